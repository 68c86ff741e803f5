"""Stepping in backward: the same bits as a step at the end, and gradients that never all exist."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.measure.peak_memory import measure_peak
from stages.training.optimizer_in_backward import OptimizerInBackward
from stages.training.recompute import apply_recompute
from tests.training.optimizer_runs import optimizer_run
from tests.training.small_run import CPU, SmallRun, bit_equal, weights

IN_BACKWARD = {"optimizer_in_backward": True}


def states(run: SmallRun) -> dict[str, torch.Tensor]:
    return {
        f"{key} {name}": tensor.clone()
        for name, parameter in run.state.model.named_parameters()
        for key, tensor in run.state.optimizer.state[parameter].items()
    }


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"loss": "chunked"},
        {"recompute": "every_block"},
        {"precision": "amp_bf16", "recompute": "every_block", "loss": "chunked"},
        {"optimizer": "adamw_8bit"},
        {"optimizer": "adamw_8bit", "precision": "amp_bf16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_bit_equal_to_a_step_at_the_end(tmp_path: Path, variant: dict[str, Any], tied: bool) -> None:
    settings: dict[str, Any] = {"max_grad_norm": None, "model": {"tie_word_embeddings": tied}}
    at_the_end = optimizer_run(tmp_path, variant, **settings)
    in_backward = optimizer_run(tmp_path, variant | IN_BACKWARD, **settings)
    assert isinstance(in_backward.state.optimizer, OptimizerInBackward)
    for run in (at_the_end, in_backward):
        apply_recompute(run.state.model, run.variant)
    for _ in range(5):
        losses = [float(run.step().loss) for run in (at_the_end, in_backward)]
        assert losses[0] == losses[1]
    assert bit_equal(weights(in_backward.state), weights(at_the_end.state))
    assert bit_equal(states(in_backward), states(at_the_end))


def test_bf16_trains(tmp_path: Path) -> None:
    """Not the same bits as at the end: the random ones are drawn in another order."""
    run = optimizer_run(tmp_path, {"precision": "bf16"} | IN_BACKWARD)
    losses = [float(run.step().loss) for _ in range(20)]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_is_stepped_once(tmp_path: Path, tied: bool) -> None:
    run = optimizer_run(tmp_path, IN_BACKWARD, model={"tie_word_embeddings": tied})
    for _ in range(3):
        run.step()
    counts = {
        name: int(run.state.optimizer.state[p]["step"]) for name, p in run.state.model.named_parameters()
    }
    assert set(counts.values()) == {3}


def test_the_norm_is_that_of_all_gradients(tmp_path: Path) -> None:
    at_the_end = optimizer_run(tmp_path, {}, max_grad_norm=None)
    in_backward = optimizer_run(tmp_path, IN_BACKWARD)
    optimizer = in_backward.state.optimizer
    assert isinstance(optimizer, OptimizerInBackward)
    for _ in range(3):
        expected = at_the_end.step().grad_norm
        in_backward.step()
        torch.testing.assert_close(optimizer.grad_norm(), expected, rtol=1e-6, atol=0)


def test_all_gradients_never_exist(tmp_path: Path) -> None:
    run = optimizer_run(tmp_path, IN_BACKWARD)
    parameters = list(run.state.model.parameters())
    most = 0

    def count(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(parameter.grad is not None for parameter in parameters))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    run.step()
    assert most == 0, "ours ran first and freed it"
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_it_does_not_outlive_its_run(tmp_path: Path, optimizer: str) -> None:
    """Hooks make cycles that Python cannot see into: a second training would not fit beside the first."""
    run = optimizer_run(tmp_path, IN_BACKWARD | {"optimizer": optimizer})
    run.step()
    parameter = weakref.ref(run.state.model.lm_head.weight)
    del run
    gc.collect()
    assert parameter() is None


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_peak_memory_falls_by_the_gradients(tmp_path: Path, optimizer: str) -> None:
    """Small activations beside many weights, so that the gradients are most of the peak."""
    model = {"hidden_size": 128, "num_hidden_layers": 10, "intermediate_size": 256}
    settings: dict[str, Any] = {"max_grad_norm": None, "sequence_length": 2, "model": model}
    peaks = []
    for extra in ({}, IN_BACKWARD):
        variant = {"optimizer": optimizer, "loss": "chunked", "recompute": "every_block"} | extra
        run = optimizer_run(tmp_path, variant, **settings)
        apply_recompute(run.state.model, run.variant)
        run.step()
        peaks.append(measure_peak(CPU, run.step).bytes)
        gradient_bytes = sum(p.nbytes for p in run.state.model.parameters())
        del run  # and with it all its memory, or the second peak would hold the first run's
    assert peaks[0] - peaks[1] > 0.75 * gradient_bytes
