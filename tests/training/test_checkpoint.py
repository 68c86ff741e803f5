"""`TrainState` is the checkpoint: every field comes back, to the bit, or the file is refused."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stages.params import Params
from stages.training.checkpoint import (
    MODEL,
    OPTIMIZER,
    RNG,
    STATE,
    CheckpointError,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from stages.training.schedule import WarmupCosine
from stages.training.state import TrainState, initial_state
from tests.model.small_llama import hugging_face_twin
from tests.training.small_run import CPU, SmallRun, bit_equal, small_params, small_run, weights

FILES = {MODEL, OPTIMIZER, RNG, STATE}
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])


def scaler() -> torch.amp.GradScaler:
    """Overflows in the first step, then grows after every third."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)


def run_of(folder: Path, precision: str, **settings: Any) -> SmallRun:
    variant = {"precision": precision, "micro_batch_size": 4}
    return small_run(folder, small_params(variant, **settings), scaler() if precision == "amp_fp16" else None)


def save(state: TrainState, folder: Path) -> Path:
    folder.mkdir()
    save_checkpoint(state, folder)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def snapshot(value: object) -> object:
    """A field as plain data. A field of a kind not known here fails, until this test knows how to look."""
    match value:
        case torch.nn.Module():
            return {name: snapshot(tensor) for name, tensor in value.state_dict().items()}
        case torch.optim.Optimizer():
            return [
                {key: snapshot(tensor) for key, tensor in value.state.get(p, {}).items()}
                for group in value.param_groups
                for p in group["params"]
            ] + [snapshot(group["lr"]) for group in value.param_groups]
        case torch.amp.GradScaler():
            return value.state_dict()
        case WarmupCosine():
            return snapshot(value.steps_taken), snapshot(value.learning_rate)
        case torch.Tensor():
            return str(value.dtype), value.tolist()
        case int():
            return value
    return pytest.fail(f"TrainState has a field of a new kind: {type(value).__name__}")


def test_every_field_is_saved_and_restored(tmp_path: Path) -> None:
    run = run_of(tmp_path, "amp_fp16")
    while run.state.step < 12 or run.state.scaler.state_dict()["_growth_tracker"] == 0:
        run.step()
    run.state.skipped_in_a_row += 1  # it is 0 again wherever the scaler's own count is not
    folder = save(run.state, tmp_path / "checkpoint")
    restored, fresh = (run_of(tmp_path, "amp_fp16").state for _ in range(2))
    load_checkpoint(restored, folder)
    for field in dataclasses.fields(TrainState):
        trained, loaded, initial = (
            snapshot(getattr(state, field.name)) for state in (run.state, restored, fresh)
        )
        assert trained != initial, f"TrainState.{field.name} must have changed for this test to mean anything"
        assert loaded == trained, f"TrainState.{field.name} is not restored"
    assert bit_equal(weights(restored), weights(run.state))


def test_the_optimizer_still_holds_the_schedules_rate(tmp_path: Path) -> None:
    run = run_of(tmp_path, "fp32")
    run.step()
    folder = save(run.state, tmp_path / "checkpoint")
    restored = run_of(tmp_path, "fp32").state
    parameters = [id(p) for p in restored.model.parameters()]
    load_checkpoint(restored, folder)
    assert all(group["lr"] is restored.schedule.learning_rate for group in restored.optimizer.param_groups)
    assert [id(p) for p in restored.model.parameters()] == parameters, "the optimizer steps these tensors"


@PRECISIONS
@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_saved_again_it_is_the_same_bytes(tmp_path: Path, precision: str, steps: int, tied: bool) -> None:
    model = {"tie_word_embeddings": tied}
    run = run_of(tmp_path, precision, model=model)
    for _ in range(steps):
        run.step()
    first = save(run.state, tmp_path / "first")
    torch.rand(7)  # the generators' states must come from the files
    restored = run_of(tmp_path, precision, model=model).state
    load_checkpoint(restored, first)
    assert contents(save(restored, tmp_path / "second")) == contents(first)
    assert contents(first).keys() == FILES


@PRECISIONS
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_stopping_changes_nothing(tmp_path: Path, precision: str, loss: str) -> None:
    params = small_params({"precision": precision, "loss": loss, "micro_batch_size": 4})

    def begin() -> SmallRun:
        return small_run(tmp_path, params, scaler() if precision == "amp_fp16" else None)

    through = begin()
    for _ in range(14):
        through.step()
    stopped = begin()
    for stop, steps in enumerate((1, 6, 5, 2)):
        for _ in range(steps):
            stopped.step()
        folder = save(stopped.state, tmp_path / f"stop {stop}")
        stopped = begin()
        load_checkpoint(stopped.state, folder)
    assert contents(save(stopped.state, tmp_path / "b")) == contents(save(through.state, tmp_path / "a"))
    if precision == "amp_fp16":
        assert int(through.state.skipped_steps) > 0, "an overflow before a stop must have been tried"


def test_the_generators_go_on_where_they_were(tmp_path: Path) -> None:
    run = run_of(tmp_path, "fp32")
    torch.rand(11)
    folder = save(run.state, tmp_path / "checkpoint")
    expected = torch.rand(5)
    load_checkpoint(run_of(tmp_path, "fp32").state, folder)
    assert torch.equal(torch.rand(5), expected)


def trained(folder: Path, global_seed: int) -> dict[str, str]:
    torch.manual_seed(global_seed)
    torch.rand(global_seed)
    run = run_of(folder, "amp_bf16")
    for _ in range(3):
        run.step()
    return contents(save(run.state, folder / "checkpoint"))


def test_the_same_params_give_the_same_bytes(tmp_path: Path) -> None:
    assert trained(tmp_path / "one", 1) == trained(tmp_path / "two", 2)


@pytest.mark.slow
def test_the_same_params_give_the_same_bytes_in_other_processes(tmp_path: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path; from tests.training import test_checkpoint as t; "
        "print(json.dumps(t.trained(Path(sys.argv[1]), int(sys.argv[2]))))"
    )
    results = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / hash_seed), hash_seed],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert json.loads(results[0]) == json.loads(results[1])
    assert json.loads(results[0]).keys() == FILES


def test_nothing_in_it_is_pickled(tmp_path: Path) -> None:
    run = run_of(tmp_path, "amp_fp16")
    run.step()
    folder = save(run.state, tmp_path / "checkpoint")
    for file in folder.iterdir():
        assert not zipfile.is_zipfile(file), file.name
        assert file.suffix in (".safetensors", ".json"), file.name
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            with safe_open(file, "pt") as opened:
                assert opened.keys()


def test_weights_load_in_transformers(tmp_path: Path) -> None:
    run = run_of(tmp_path, "fp32")
    run.step()
    weights_on_disk = load_file(save(run.state, tmp_path / "checkpoint") / MODEL)
    twin = hugging_face_twin(run.state.model)
    assert bit_equal(weights_on_disk, dict(twin.state_dict()))
    assert all(tensor.dtype is torch.float32 for tensor in weights_on_disk.values())


# Files that are not a whole checkpoint of this model.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run = run_of(folder, "amp_fp16")
    for _ in range(8):
        run.step()
    return save(run.state, folder / "checkpoint")


def fresh_state(params: Params | None = None) -> TrainState:
    state, _ = initial_state(params or small_params({"precision": "amp_fp16"}), "v", CPU)
    return state


def copy_with(whole: Path, folder: Path, name: str, content: bytes | None) -> Path:
    folder.mkdir(exist_ok=True)
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    return folder


def test_the_whole_one_loads(whole: Path) -> None:
    load_checkpoint(fresh_state(), whole)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_file_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(fresh_state(), copy_with(whole, tmp_path / "broken", name, None))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(FILES)), share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_anywhere(whole: Path, tmp_path: Path, name: str, share: float) -> None:
    content = (whole / name).read_bytes()
    # The last byte of state.json is a newline, which nothing needs.
    kept = int(share * (len(content) - (name == STATE)))
    with pytest.raises(CheckpointError):
        load_checkpoint(fresh_state(), copy_with(whole, tmp_path / "broken", name, content[:kept]))


FOREIGN = {
    "zeros": b"\0" * 200,
    "text": b"not a checkpoint",
    "list": b"[]",
    "empty object": b"{}",
    "not utf-8": b"\xff\xfe\xfd",
}


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_content(whole: Path, tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(CheckpointError):
        load_checkpoint(fresh_state(), copy_with(whole, tmp_path / "broken", name, content))


@pytest.mark.parametrize(
    ("name", "taken_from"),
    [(a, b) for a in sorted(FILES - {STATE}) for b in sorted(FILES - {STATE}) if a != b],
)
def test_one_file_in_anothers_place(whole: Path, tmp_path: Path, name: str, taken_from: str) -> None:
    broken = copy_with(whole, tmp_path / "broken", name, (whole / taken_from).read_bytes())
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(fresh_state(), broken)


@pytest.mark.parametrize(
    "key",
    [
        "format",
        "step",
        "tokens",
        "skipped_steps",
        "skipped_in_a_row",
        "losses_since_row",
        "loss_since_row",
        "schedule_steps_taken",
        "scaler",
    ],
)
def test_a_state_without_one_of_its_values(whole: Path, tmp_path: Path, key: str) -> None:
    scalars = json.loads((whole / STATE).read_text())
    del scalars[key]
    broken = copy_with(whole, tmp_path / "broken", STATE, json.dumps(scalars).encode())
    with pytest.raises(CheckpointError, match=key):
        load_checkpoint(fresh_state(), broken)


@pytest.mark.parametrize("key", ["step", "tokens", "schedule_steps_taken", "scaler"])
def test_a_state_with_a_value_of_another_kind(whole: Path, tmp_path: Path, key: str) -> None:
    scalars = json.loads((whole / STATE).read_text()) | {key: "many"}
    broken = copy_with(whole, tmp_path / "broken", STATE, json.dumps(scalars).encode())
    with pytest.raises(CheckpointError):
        load_checkpoint(fresh_state(), broken)


def test_another_format(whole: Path, tmp_path: Path) -> None:
    scalars = json.loads((whole / STATE).read_text()) | {"format": 99}
    broken = copy_with(whole, tmp_path / "broken", STATE, json.dumps(scalars).encode())
    with pytest.raises(CheckpointError, match=r"format 99, this version reads 2"):
        load_checkpoint(fresh_state(), broken)


OTHER_MODELS = {
    "wider": {"hidden_size": 64},
    "fewer layers": {"num_hidden_layers": 1},
    "more layers": {"num_hidden_layers": 3},
    "other kv heads": {"num_key_value_heads": 4},
    "other feed-forward": {"intermediate_size": 56},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
@pytest.mark.parametrize("model", OTHER_MODELS.values(), ids=OTHER_MODELS.keys())
def test_a_file_of_another_model(whole: Path, tmp_path: Path, name: str, model: dict[str, object]) -> None:
    """Also each file alone: a folder put together from two runs."""
    run = small_run(tmp_path, small_params({"precision": "amp_bf16"}, model=model))
    run.step()
    foreign = (save(run.state, tmp_path / "other") / name).read_bytes()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(fresh_state(), copy_with(whole, tmp_path / "broken", name, foreign))


@pytest.mark.parametrize(
    "lost", ["exp_avg.model.norm.weight", "exp_avg_sq.model.layers.1.mlp.up_proj.weight"]
)
def test_an_optimizer_without_one_moment(whole: Path, tmp_path: Path, lost: str) -> None:
    """It would otherwise begin again at zero, silently."""
    moments = load_file(whole / OPTIMIZER)
    del moments[lost]
    broken = copy_with(whole, tmp_path / "broken", OPTIMIZER, b"")
    save_file(moments, broken / OPTIMIZER)
    with pytest.raises(CheckpointError, match=OPTIMIZER):
        load_checkpoint(fresh_state(), broken)


def test_a_run_without_a_scaler_does_not_continue_one_with(tmp_path: Path) -> None:
    folder = save(run_of(tmp_path, "amp_bf16").state, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="scaler"):
        load_checkpoint(fresh_state(), folder)


@pytest.mark.parametrize("name", [OPTIMIZER, RNG, STATE])
def test_a_refused_checkpoint_leaves_the_state_alone(whole: Path, tmp_path: Path, name: str) -> None:
    state = fresh_state()
    before = weights(state)
    with pytest.raises(CheckpointError):
        load_checkpoint(state, copy_with(whole, tmp_path / "broken", name, b"{}"))
    assert bit_equal(weights(state), before)
    assert state.step == 0


@pytest.mark.parametrize("model", OTHER_MODELS.values(), ids=OTHER_MODELS.keys())
def test_weights_of_another_model(whole: Path, model: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=MODEL):
        load_weights(fresh_state(small_params(model=model)).model, whole)


def test_weights_that_are_missing_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file; train the variant first"):
        load_weights(fresh_state().model, tmp_path)


def test_weights_load_alone(whole: Path) -> None:
    state, full = fresh_state(), fresh_state()
    load_weights(state.model, whole)
    load_checkpoint(full, whole)
    assert bit_equal(weights(state), weights(full))
    assert state.step == 0
