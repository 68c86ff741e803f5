"""A checkpoint that the disk, or somebody, changed: recognised, named, never gone on from, never run."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.training.checkpoint import (
    MODEL,
    OPTIMIZER,
    RNG,
    STATE,
    CheckpointError,
    Snapshot,
    load_weights,
    take_snapshot,
)
from stages.training.checkpoint_store import CheckpointStore
from stages.training.checksums import CHECKSUMS, PROGRESS
from stages.training.state import TrainState, initial_state
from tests.training.small_run import CPU, small_params, small_run

FILES = (MODEL, OPTIMIZER, RNG, STATE, PROGRESS, CHECKSUMS)
OLDER, NEWEST = "step-000000002", "step-000000004"
# With a GradScaler, so that its state is in what must come back.
PARAMS = small_params({"precision": "amp_fp16", "micro_batch_size": 4})


@dataclass(frozen=True)
class Saved:
    """Two checkpoints of one training and what they must give back."""

    folder: Path
    states: dict[str, Snapshot]
    progress: dict[str, dict[str, Any]]

    def copy_to(self, folder: Path) -> CheckpointStore:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return CheckpointStore(folder, keep=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    run = small_run(tmp_path_factory.mktemp("tokens"), PARAMS)
    store = CheckpointStore(folder, keep=2)
    states, progress = {}, {}
    for name in (OLDER, NEWEST):
        run.step()
        run.step()
        states[name] = take_snapshot(run.state)
        progress[name] = {"rows": [{"step": run.state.step, "loss": 0.1}]}
        store.save_now(run.state, progress[name])
    assert [path.name for path in store.checkpoints()] == [OLDER, NEWEST]
    assert states[OLDER].scalars["scaler"], "the scaler is part of the state"
    return Saved(folder, states, progress)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place") / "work"


@pytest.fixture(autouse=True)
def generator_state() -> Iterator[None]:
    """A restore sets torch's global generator."""
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


def fresh_state() -> TrainState:
    return initial_state(PARAMS, "v", CPU)[0]


def assert_equal(found: Snapshot, expected: Snapshot) -> None:
    assert found.scalars == expected.scalars
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensors in expected.tensors.items():
        assert found.tensors[name].keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert torch.equal(found.tensors[name][key], tensor), f"{name}: {key}"


def damaged(content: bytes, bit: int, *, cut: bool) -> bytes:
    """`content` cut before the byte of this bit, or with the bit flipped."""
    byte = bit // 8
    if cut:
        return content[:byte]
    return content[:byte] + bytes([content[byte] ^ 1 << bit % 8]) + content[byte + 1 :]


def means_the_same(name: str, content: bytes, original: bytes) -> bool:
    """The list of checksums is read as JSON: without its last newline it is the same list."""
    if name != CHECKSUMS:
        return content == original
    try:
        return bool(json.loads(content) == json.loads(original))
    except ValueError:
        return False


def test_whole_ones_give_the_newest(saved: Saved, place: Path) -> None:
    state = fresh_state()
    restored = saved.copy_to(place).restore(state)
    assert restored is not None and (restored.folder.name, restored.damaged) == (NEWEST, ())
    assert restored.progress == saved.progress[NEWEST]
    assert_equal(take_snapshot(state), saved.states[NEWEST])


@settings(max_examples=200)
@given(data=st.data(), name=st.sampled_from(FILES), cut=st.booleans())
def test_a_damaged_newest_is_named_and_the_one_before_is_used(
    saved: Saved, place: Path, data: st.DataObject, name: str, cut: bool
) -> None:
    """200 cases. Damage in the list of checksums may be told as that of the file whose line it hit."""
    original = (saved.folder / NEWEST / name).read_bytes()
    content = damaged(original, data.draw(st.integers(0, len(original) * 8 - 1), "bit"), cut=cut)
    store = saved.copy_to(place)
    (place / NEWEST / name).write_bytes(content)

    state = fresh_state()
    restored = store.restore(state)

    assert restored is not None
    if means_the_same(name, content, original):
        assert (restored.folder.name, restored.damaged) == (NEWEST, ())
        return
    assert restored.folder.name == OLDER
    assert restored.progress == saved.progress[OLDER]
    assert_equal(take_snapshot(state), saved.states[OLDER])
    (sentence,) = restored.damaged
    assert "\n" not in sentence
    named = [file for file in FILES if str(place / NEWEST / file) in sentence]
    assert named == [name] or (name == CHECKSUMS and len(named) == 1)


@settings(max_examples=30)
@given(data=st.data(), names=st.tuples(st.sampled_from(FILES), st.sampled_from(FILES)), cut=st.booleans())
def test_with_both_damaged_nothing_is_loaded(
    saved: Saved, place: Path, data: st.DataObject, names: tuple[str, str], cut: bool
) -> None:
    store = saved.copy_to(place)
    for folder, name in zip((OLDER, NEWEST), names, strict=True):
        path = place / folder / name
        original = path.read_bytes()
        # The second half: the last byte of the checksums, a newline, is no damage.
        bit = data.draw(st.integers(len(original) * 4, (len(original) - 2) * 8), "bit")
        path.write_bytes(damaged(original, bit, cut=cut))
    state = fresh_state()
    before = take_snapshot(state)
    with pytest.raises(CheckpointError) as raised:
        store.restore(state)
    assert OLDER in str(raised.value) and NEWEST in str(raised.value)
    assert_equal(take_snapshot(state), before)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_damage(saved: Saved, place: Path, name: str) -> None:
    store = saved.copy_to(place)
    (place / NEWEST / name).unlink()
    state = fresh_state()
    restored = store.restore(state)
    assert restored is not None and restored.folder.name == OLDER and len(restored.damaged) == 1
    assert_equal(take_snapshot(state), saved.states[OLDER])


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.proof,)


def write_pickle(path: Path, proof: Path, form: str) -> None:
    if form == "pickle":
        path.write_bytes(pickle.dumps(Payload(proof)))
    else:
        torch.save({"model": Payload(proof)}, path)


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_the_payload_is_one(tmp_path: Path, form: str) -> None:
    """Otherwise the tests below show nothing."""
    write_pickle(tmp_path / "payload", tmp_path / "proof", form)
    if form == "pickle":
        pickle.loads((tmp_path / "payload").read_bytes())
    else:
        torch.load(tmp_path / "payload", weights_only=False)
    assert (tmp_path / "proof").exists()


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
@pytest.mark.parametrize("has_new_checksums", [False, True])
@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, RNG, STATE])
def test_a_pickle_in_the_place_of_a_file_is_refused_and_does_not_run(
    saved: Saved, place: Path, tmp_path: Path, name: str, has_new_checksums: bool, form: str
) -> None:
    store = saved.copy_to(place)
    write_pickle(place / NEWEST / name, tmp_path / "proof", form)
    if has_new_checksums:
        sign(place / NEWEST)
    state = fresh_state()
    restored = store.restore(state)
    assert not (tmp_path / "proof").exists()
    assert restored is not None and restored.folder.name == OLDER
    (sentence,) = restored.damaged
    assert str(place / NEWEST / name) in sentence
    assert_equal(take_snapshot(state), saved.states[OLDER])


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
@pytest.mark.parametrize("has_new_checksums", [False, True])
def test_a_pickle_beside_the_files_does_not_run(
    saved: Saved, place: Path, tmp_path: Path, has_new_checksums: bool, form: str
) -> None:
    """Unlisted it makes the checkpoint a changed one; listed it is a file that nobody opens."""
    store = saved.copy_to(place)
    write_pickle(place / NEWEST / "optimizer.pt", tmp_path / "proof", form)
    if has_new_checksums:
        sign(place / NEWEST)
    restored = store.restore(fresh_state())
    assert not (tmp_path / "proof").exists()
    assert restored is not None
    assert restored.folder.name == (NEWEST if has_new_checksums else OLDER)
    assert len(restored.damaged) == (not has_new_checksums)


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_a_pickle_for_weights_to_evaluate_is_refused(tmp_path: Path, form: str) -> None:
    write_pickle(tmp_path / MODEL, tmp_path / "proof", form)
    with pytest.raises(CheckpointError, match=MODEL):
        load_weights(fresh_state().model, tmp_path)
    assert not (tmp_path / "proof").exists()


def sign(folder: Path) -> None:
    """As whoever can write the files can."""
    (folder / CHECKSUMS).unlink()
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / CHECKSUMS).write_text(
        json.dumps(
            {
                name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for name, content in contents.items()
            }
        )
    )
