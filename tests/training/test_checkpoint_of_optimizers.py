"""Every optimizer's state comes back to the bit, in its own types, under Hugging Face's names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.training.checkpoint import MODEL, OPTIMIZER, CheckpointError, load_checkpoint, save_checkpoint
from tests.training.optimizer_runs import VARIANTS, optimizer_run
from tests.training.small_run import SmallRun, bit_equal, weights

ALL = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


def save(run: SmallRun, folder: Path) -> Path:
    folder.mkdir()
    save_checkpoint(run.state, folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@ALL
@pytest.mark.parametrize("tied", [False, True])
def test_stopping_changes_nothing(tmp_path: Path, variant: dict[str, Any], tied: bool) -> None:
    """Stopped before the first step, after it and later; saved again at once each time."""

    def begin() -> SmallRun:
        torch.rand(3)  # the generators must be restored and not only be where they were
        return optimizer_run(tmp_path, variant, model={"tie_word_embeddings": tied})

    through = begin()
    for _ in range(6):
        through.step()
    expected = contents(save(through, tmp_path / "through"))
    stopped = begin()
    for stop, steps in enumerate((0, 1, 3, 2)):
        for _ in range(steps):
            stopped.step()
        folder = save(stopped, tmp_path / f"stop {stop}")
        stopped = begin()
        load_checkpoint(stopped.state, folder)
        assert contents(save(stopped, tmp_path / f"again {stop}")) == contents(folder)
    assert contents(folder) == expected


@ALL
def test_types_and_names(tmp_path: Path, variant: dict[str, Any]) -> None:
    run = optimizer_run(tmp_path, variant)
    run.step()
    folder = save(run, tmp_path / "checkpoint")
    on_disk, names = load_file(folder / OPTIMIZER), set(load_file(folder / MODEL))
    assert {key.partition(".")[2] for key in on_disk} == names
    kept = {name: run.state.optimizer.state[p] for name, p in run.state.model.named_parameters()}
    assert {(k, t.dtype) for state in kept.values() for k, t in state.items()} == {
        (key.partition(".")[0], tensor.dtype) for key, tensor in on_disk.items()
    }
    counted = sum(t.nbytes for state in kept.values() for key, t in state.items() if key != "step")
    assert counted == sum(t.nbytes for key, t in on_disk.items() if not key.startswith("step."))
    weight_type = torch.bfloat16 if variant.get("precision") == "bf16" else torch.float32
    assert {tensor.dtype for tensor in load_file(folder / MODEL).values()} == {weight_type}
    if variant.get("optimizer") == "adamw_8bit":
        scales = on_disk["exp_avg_scales.model.layers.1.self_attn.k_proj.weight"]
        codes = on_disk["exp_avg_codes.model.layers.1.self_attn.k_proj.weight"]
        assert (codes.shape, codes.dtype, scales.shape) == ((32, 64), torch.uint8, (32, 1))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("adamw", "adamw_8bit"),
        ("adamw_8bit", "adamw"),
        ("adamw", "muon"),
        ("muon", "adamw"),
        ("adamw", "adamw bf16"),
        ("adamw bf16", "adamw"),
    ],
)
def test_another_optimizer_or_precision_is_refused(tmp_path: Path, saved: str, loaded: str) -> None:
    run = optimizer_run(tmp_path, VARIANTS[saved])
    run.step()
    folder = save(run, tmp_path / "checkpoint")
    other = optimizer_run(tmp_path, VARIANTS[loaded])
    before = weights(other.state)
    with pytest.raises(CheckpointError, match=r"safetensors.* another"):
        load_checkpoint(other.state, folder)
    assert bit_equal(weights(other.state), before)


@pytest.mark.parametrize("name", ["adamw", "adamw bf16", "adamw_8bit"])
def test_in_backward_or_at_the_end_is_the_same_checkpoint(tmp_path: Path, name: str) -> None:
    run = optimizer_run(tmp_path, VARIANTS[name])
    run.step()
    folder = save(run, tmp_path / "checkpoint")
    other = optimizer_run(tmp_path, VARIANTS[f"{name} in backward"])
    load_checkpoint(other.state, folder)
    assert contents(save(other, tmp_path / "again")) == contents(folder)
