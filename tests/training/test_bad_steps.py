"""Losses and gradients that are no numbers: no weight is touched, and the run says where it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.data.batch_order import BatchOrder
from stages.data.sequences import FILLER
from stages.measure.compilation import CompileWatch
from stages.measure.throughput import StepTimer
from stages.training.bad_steps import BadStepError, may_be_saved
from stages.training.loop import CurveRow, Measurements, training_steps
from stages.training.optimizer_in_backward import OptimizerInBackward
from tests.training.small_run import GLOBAL_BATCH_SIZE, SmallRun, bit_equal, small_params, small_run

BAD_STEP, BAD_SEQUENCE = 5, 3


def everything(run: SmallRun) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's state."""
    tensors = {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}
    for name, parameter in run.state.model.named_parameters():
        for key, value in run.state.optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = torch.as_tensor(value).clone()
    return tensors


def damage(run: SmallRun, what: str) -> None:
    """From BAD_STEP on, the sequence BAD_SEQUENCE makes the loss NaN, or only the gradients infinite."""
    bad_ids = run.sequences.micro_batch(np.array([BAD_SEQUENCE])).input_ids_BS[0]
    embedding, head = run.state.model.embed_tokens, run.state.model.lm_head.weight
    is_bad = False

    def on_forward(_module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> Any:
        nonlocal is_bad
        is_bad = run.state.step >= BAD_STEP and bool((inputs[0] == bad_ids).all(dim=1).any())
        return output * float("nan") if is_bad and what == "loss" else None

    embedding.register_forward_hook(on_forward)
    if what == "gradient":
        head.register_hook(lambda gradient: gradient * float("inf") if is_bad else gradient)


def first_bad_batch(run: SmallRun) -> tuple[int, int, list[int]]:
    """Step and micro-batch, both from 1, and the sequences of the first batch that is bad."""
    order = BatchOrder(run.params.seed, GLOBAL_BATCH_SIZE, len(run.sequences))
    size = run.params.variants["v"].micro_batch_size
    for step in range(BAD_STEP, 100):
        for number, rows in enumerate(order.indices(step).reshape(-1, size).tolist(), 1):
            if BAD_SEQUENCE in rows:
                return step + 1, number, [row for row in rows if row != FILLER]
    raise AssertionError("the sequence never comes")


def steps_of(run: SmallRun) -> Iterator[CurveRow | None]:
    measurements = Measurements(StepTimer(), CompileWatch(enabled=False))
    return training_steps(run.state, run.sequences, run.params, "v", run.policy, measurements)


VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"micro_batch_size": 4},
    "amp_bf16": {"micro_batch_size": 4, "precision": "amp_bf16"},
    "bf16": {"micro_batch_size": 4, "precision": "bf16"},
    "adamw_8bit": {"micro_batch_size": 4, "optimizer": "adamw_8bit"},
    "muon": {"micro_batch_size": 4, "optimizer": "muon"},
    "in_backward": {"micro_batch_size": 8, "optimizer_in_backward": True},
}


def run_of(tmp_path: Path, techniques: str, **training: Any) -> SmallRun:
    if techniques == "in_backward":
        training["max_grad_norm"] = None
    return small_run(tmp_path, small_params(VARIANTS[techniques], **training))


@pytest.mark.parametrize("techniques", VARIANTS)
def test_the_optimizer_is_not_touched_and_the_place_is_named(tmp_path: Path, techniques: str) -> None:
    run = run_of(tmp_path, techniques)
    damage(run, "loss")
    with pytest.raises(BadStepError) as caught:
        for _ in steps_of(run):
            before = everything(run)
    assert bit_equal(everything(run), before), "the weights must be those of the last good step"
    step, number, rows = first_bad_batch(run)
    message = str(caught.value)
    assert message.startswith(f"step {step}: the loss is nan in micro-batch {number} of ")
    assert f"sequences {', '.join(str(row) for row in rows)} of the train split" in message
    assert "training.max_bad_steps" in message
    assert not may_be_saved(run.state, run.params.training)


def test_gradients_without_a_bad_loss(tmp_path: Path) -> None:
    run = run_of(tmp_path, "fp32")
    damage(run, "gradient")
    with pytest.raises(BadStepError, match=r"a gradient is no number in micro-batch \d of 2"):
        for _ in steps_of(run):
            before = everything(run)
    assert bit_equal(everything(run), before)


def test_so_many_may_be_left_out(tmp_path: Path) -> None:
    """The run ends, its curve has numbers only, and one batch more than allowed stops it."""
    params = small_params(VARIANTS["fp32"], max_bad_steps=100)
    run = small_run(tmp_path, params)
    damage(run, "loss")
    rows = [row for row in steps_of(run) if row is not None]
    skipped = int(run.state.skipped_steps)
    assert skipped > 0
    assert run.state.step == params.training.num_steps
    assert int(run.state.schedule.steps_taken) == params.training.num_steps - skipped
    assert all(np.isfinite(row.loss) for row in rows)
    assert may_be_saved(run.state, params.training)

    one_less = small_run(tmp_path, small_params(VARIANTS["fp32"], max_bad_steps=skipped - 1))
    damage(one_less, "loss")
    with pytest.raises(BadStepError, match=rf"\({skipped - 1} were left out before\)"):
        list(steps_of(one_less))


@pytest.mark.parametrize("techniques", ["fp32", "in_backward"])
def test_steps_after_a_bad_one_change_nothing_until_the_host_looks(tmp_path: Path, techniques: str) -> None:
    """A GPU's host looks at the next row only. The steps up to there must not train on."""
    run = run_of(tmp_path, techniques)
    for _ in range(3):
        run.step()
    before = everything(run)
    run.state.skipped_steps += 1
    for _ in range(3):
        assert bool(run.step().skipped)
    assert bit_equal(everything(run), before)
    assert int(run.state.skipped_steps) == 4
    assert isinstance(run.state.optimizer, OptimizerInBackward) == (techniques == "in_backward")


def test_a_scale_that_cannot_be_found(tmp_path: Path) -> None:
    """Overflow in every step: the scaler would halve for ever."""
    params = small_params({"precision": "amp_fp16", "micro_batch_size": 8}, max_overflows_in_a_row=6)
    run = small_run(tmp_path, params)
    run.state.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = everything(run)
    with pytest.raises(BadStepError, match=r"overflowed in 6 steps in a row up to step 6 .* amp_bf16"):
        list(steps_of(run))
    after = everything(run)
    assert bit_equal({name: after[name] for name in before}, before)
    assert run.state.scaler.get_scale() == 2.0**16 / 2**6
