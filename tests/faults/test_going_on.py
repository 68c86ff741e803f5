"""What a killed training finds: damaged checkpoints, changed params. The whole stage."""

import signal
from pathlib import Path

import pytest

from tests.faults.stage_process import StageProcess, results, train
from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow


@pytest.fixture
def killed(repository: Repository) -> tuple[Repository, list[Path]]:
    """A training that died with two checkpoints, oldest first."""
    process = StageProcess(repository, "train", "baseline")
    process.wait_for(".work/train/baseline/*/step-000000[1-9][0-9]0")
    process.wait_for_checkpoint()
    while len(found := sorted((repository.root / ".work/train/baseline").glob("*/step-*"))) < 2:
        assert process.process.poll() is None
    process.send(signal.SIGSTOP)
    process.send(signal.SIGKILL)
    assert process.end().status == -signal.SIGKILL
    found = sorted((repository.root / ".work/train/baseline").glob("*/step-*"))
    # Killed between the new one's name and the removal of the oldest it has three.
    return repository, found[-2:]


def cut(checkpoint: Path) -> Path:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return file


def test_a_damaged_newest_is_named_once_and_the_result_is_the_same(
    killed: tuple[Repository, list[Path]], uninterrupted: dict[str, str]
) -> None:
    repository, (older, newest) = killed
    damaged = cut(newest)
    ended = train(repository, "baseline")
    assert ended.status == 0, ended
    assert ended.errors() == [
        f"train baseline: {damaged} is not as it was written: the file is damaged; "
        "the checkpoint before it is used"
    ]
    assert f"going on after step {int(older.name.removeprefix('step-'))} of 600" in ended.stdout
    assert results(repository.root, "baseline") == uninterrupted


def test_with_none_that_is_good_it_starts_over_only_when_told(
    killed: tuple[Repository, list[Path]], uninterrupted: dict[str, str]
) -> None:
    repository, kept = killed
    for folder in kept[0].parent.glob("step-*"):
        cut(folder)
    ended = train(repository, "baseline")
    assert ended.status == 1
    (line,) = ended.errors()
    assert line.startswith(f"train baseline: no checkpoint in {kept[0].parent} can be used: "), line
    assert all(folder.name in line for folder in kept)
    assert line.endswith("`python -m stages.train baseline --fresh` or `make clean-work` starts over")
    assert not (repository.root / "models/baseline").exists()

    ended = train(repository, "baseline", "--fresh")
    assert ended.status == 0 and "going on" not in ended.stdout, ended
    assert results(repository.root, "baseline") == uninterrupted


def test_changed_params_start_afresh_and_the_old_ones_go_on(
    killed: tuple[Repository, list[Path]], uninterrupted: dict[str, str]
) -> None:
    repository, (_, newest) = killed
    before = (repository.root / "params.yaml").read_bytes()
    repository.edit_params(lambda params: params["training"].update(learning_rate=0.001))
    other = train(repository, "baseline")
    assert other.status == 0 and "going on" not in other.stdout, other
    assert results(repository.root, "baseline") != uninterrupted

    (repository.root / "params.yaml").write_bytes(before)
    same = train(repository, "baseline")
    assert f"going on after step {int(newest.name.removeprefix('step-'))} of 600" in same.stdout, same
    assert results(repository.root, "baseline") == uninterrupted
