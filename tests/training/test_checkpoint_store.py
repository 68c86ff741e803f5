"""The store of the last checkpoints: what is whole under its name, what stays, and what a restart gets."""

import threading
from pathlib import Path

import pytest
import torch

from stages.training.checkpoint import MODEL, STATE, CheckpointError, Snapshot
from stages.training.checkpoint_store import CheckpointStore
from stages.training.checksums import CHECKSUMS, PROGRESS, read_checked
from tests.training.small_run import SmallRun, bit_equal, small_params, small_run


def weights(run: SmallRun) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return small_run(tmp_path / "data", small_params({"micro_batch_size": 4}))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "work").mkdir()
    return CheckpointStore(tmp_path / "work", keep=2)


def fresh(tmp_path: Path) -> SmallRun:
    return small_run(tmp_path / "data", small_params({"micro_batch_size": 4}))


def test_nothing_to_go_on_from(run: SmallRun, store: CheckpointStore) -> None:
    before = weights(run)
    assert store.restore(run.state) is None
    assert bit_equal(weights(run), before)


def test_what_is_saved_in_the_background_is_the_state_at_that_moment(
    tmp_path: Path, run: SmallRun, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step runs while the file is not yet begun."""
    run.step()
    expected, may_write = weights(run), threading.Event()
    write = store._write

    def write_later(snapshot: Snapshot, progress: dict[str, object]) -> None:
        may_write.wait()
        write(snapshot, progress)

    monkeypatch.setattr(store, "_write", write_later)
    store.save(run.state, {"rows": [1.1]})
    assert store.is_writing()
    run.step()
    may_write.set()
    store.wait()
    assert not bit_equal(weights(run), expected), "the step must have changed the weights"
    other = fresh(tmp_path)
    restored = store.restore(other.state)
    assert restored is not None and restored.progress == {"rows": [1.1]} and restored.damaged == ()
    assert other.state.step == 1
    assert bit_equal(weights(other), expected)


def test_the_last_ones_are_kept(run: SmallRun, store: CheckpointStore) -> None:
    for _ in range(12):
        run.step()
        store.save(run.state, {})
    store.wait()
    assert [int(folder.name.removeprefix("step-")) for folder in store.checkpoints()] == [11, 12]
    assert store.saves == 12
    assert store.writing_seconds > 0 and store.training_seconds > 0


def test_a_half_written_one_is_never_taken(tmp_path: Path, run: SmallRun, store: CheckpointStore) -> None:
    run.step()
    good = store.save_now(run.state, {})
    run.step()
    half = store.folder / ".step-000000002"
    half.mkdir()
    (half / MODEL).write_bytes(b"the beginning")
    other = fresh(tmp_path)
    restored = store.restore(other.state)
    assert restored is not None and restored.folder == good
    assert not half.exists(), "what a killed process left is removed"


def test_a_damaged_one_gives_way_to_the_one_before(
    tmp_path: Path, run: SmallRun, store: CheckpointStore
) -> None:
    run.step()
    expected = weights(run)
    store.save_now(run.state, {"at": 1})
    run.step()
    damaged = store.save_now(run.state, {"at": 2})
    with (damaged / MODEL).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    other = fresh(tmp_path)
    restored = store.restore(other.state)
    assert restored is not None and restored.progress == {"at": 1}
    (problem,) = restored.damaged
    assert str(damaged / MODEL) in problem
    assert bit_equal(weights(other), expected)
    # Training again to the damaged one's step puts a whole one in its place.
    other.step()
    assert store.save_now(other.state, {"at": 2}) == damaged
    assert read_checked(damaged) == {"at": 2}


def test_none_that_is_good_is_an_error_and_not_a_fresh_start(
    tmp_path: Path, run: SmallRun, store: CheckpointStore
) -> None:
    for _ in range(2):
        run.step()
        (store.save_now(run.state, {}) / STATE).unlink()
    other = fresh(tmp_path)
    before = weights(other)
    with pytest.raises(CheckpointError, match=r"step-000000002.*step-000000001"):
        store.restore(other.state)
    assert bit_equal(weights(other), before) and other.state.step == 0


@pytest.mark.parametrize("name", [PROGRESS, CHECKSUMS, "added"])
def test_a_file_too_many_or_too_few(run: SmallRun, store: CheckpointStore, name: str) -> None:
    folder = store.save_now(run.state, {})
    if name == "added":
        (folder / name).write_text("by somebody")
    else:
        (folder / name).unlink()
    with pytest.raises(CheckpointError):
        read_checked(folder)


def test_a_save_that_fails_is_a_warning_and_leaves_the_one_before(
    tmp_path: Path, run: SmallRun, store: CheckpointStore
) -> None:
    run.step()
    good = store.save_now(run.state, {})
    run.step()
    (store.folder / ".step-000000002").write_text("a file where a folder must be made")
    store.save(run.state, {})
    store.wait()
    warning = store.take_warning()
    assert warning is not None and ".step-000000002" in warning
    assert store.take_warning() is None, "said once"
    assert store.checkpoints() == [good]
    with pytest.raises(OSError, match="step-000000002"):
        store.save_now(run.state, {})


def test_a_lost_folder_is_made_again_and_said(run: SmallRun, store: CheckpointStore) -> None:
    run.step()
    store.folder.rmdir()
    store.save(run.state, {})
    store.wait()
    assert "was deleted while training" in (store.take_warning() or "")
    assert len(store.checkpoints()) == 1


def test_a_damaged_one_does_not_count_among_the_kept(
    tmp_path: Path, run: SmallRun, store: CheckpointStore
) -> None:
    run.step()
    store.save_now(run.state, {})
    run.step()
    (store.save_now(run.state, {}) / STATE).unlink()
    other = fresh(tmp_path)
    store.keep = 1
    assert store.restore(other.state) is not None and other.state.step == 1
    # Not trained on to the damaged one's step: what is saved now has the lower number.
    saved = store.save_now(other.state, {})
    assert store.checkpoints() == [saved]
    assert read_checked(saved) == {}


def test_removal_leaves_no_half_one_under_its_name(
    run: SmallRun, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while a checkpoint is deleted: what is left of it is no checkpoint."""
    run.step()
    folder = store.save_now(run.state, {})

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / STATE).unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr("stages.training.checkpoint_store.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        store.remove([folder])
    monkeypatch.undo()
    assert store.checkpoints() == []
    assert store.restore(run.state) is None
    assert list(store.folder.iterdir()) == []


def test_no_memory_for_the_copy_is_a_warning(
    run: SmallRun, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("stages.training.checkpoint_store.take_snapshot", no_memory)
    store.save(run.state, {})
    assert "can't allocate memory" in (store.take_warning() or "")
