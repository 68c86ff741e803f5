"""fp16: an overflow skips the step and the schedule, and only then; a good run grows the scale."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.model.loss import chunked_loss
from stages.training import step
from tests.training.small_run import SmallRun, bit_equal, distance, small_params, small_run, weights

LOSSES = pytest.mark.parametrize("loss", ["full", "chunked"])


def fp16_run(
    folder: Path, loss: str, *, init_scale: float, growth_interval: int = 2000, micro_batch_size: int = 4
) -> SmallRun:
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
    variant = {"precision": "amp_fp16", "loss": loss, "micro_batch_size": micro_batch_size}
    return small_run(folder, small_params(variant), scaler)


def adam_steps(run: SmallRun) -> set[int]:
    return {int(state["step"]) for state in run.state.optimizer.state.values()}


def first_moments(run: SmallRun) -> dict[str, torch.Tensor]:
    """After one step they are the gradients times 1 - beta1."""
    parameters = run.state.model.named_parameters()
    return {name: run.state.optimizer.state[p]["exp_avg"] for name, p in parameters}


@LOSSES
def test_an_overflow_skips_the_step(tmp_path: Path, loss: str) -> None:
    run = fp16_run(tmp_path, loss, init_scale=2.0**30)
    state = run.state
    before, rate = weights(state), float(state.schedule.learning_rate)
    outcome = run.step()
    assert outcome.skipped is not None and bool(outcome.skipped)
    assert not torch.isfinite(outcome.grad_norm)
    assert bit_equal(weights(state), before)
    assert state.scaler.get_scale() == 2.0**29
    assert (int(state.schedule.steps_taken), float(state.schedule.learning_rate)) == (0, rate)
    assert (state.step, int(state.skipped_steps)) == (1, 1)
    assert torch.isfinite(outcome.loss)
    assert adam_steps(run) <= {0}, "Adam's bias correction must not count a step that was skipped"


@LOSSES
def test_only_real_steps_advance_the_schedule(tmp_path: Path, loss: str) -> None:
    """The scale falls until gradients fit, then training begins at the first rate of the warm-up."""
    run = fp16_run(tmp_path, loss, init_scale=2.0**24)
    verdicts = []
    for _ in range(14):
        outcome = run.step()
        assert outcome.skipped is not None
        verdicts.append(bool(outcome.skipped))
    skipped = sum(verdicts)
    assert 0 < skipped < 14
    assert run.state.scaler.get_scale() == 2.0 ** (24 - skipped)
    assert int(run.state.skipped_steps) == skipped
    assert int(run.state.schedule.steps_taken) == 14 - skipped
    assert adam_steps(run) == {14 - skipped}
    assert run.state.step == 14


@LOSSES
def test_the_scale_grows_and_that_is_no_skip(tmp_path: Path, loss: str) -> None:
    run = fp16_run(tmp_path, loss, init_scale=256.0, growth_interval=3)
    scales = []
    for _ in range(7):
        outcome = run.step()
        assert outcome.skipped is not None and not bool(outcome.skipped)
        scales.append(run.state.scaler.get_scale())
    assert scales == [256, 256, 512, 512, 512, 1024, 1024]
    assert int(run.state.schedule.steps_taken) == 7
    assert int(run.state.skipped_steps) == 0


@LOSSES
@pytest.mark.parametrize("init_scale", [1024.0, 65536.0])
def test_accumulated_clipped_and_scaled_equals_fp32(tmp_path: Path, loss: str, init_scale: float) -> None:
    """Clipping must see the true gradients: a scaled norm would clip every step to nothing."""
    settings = {"max_grad_norm": 0.5, "sequences": "padded"}
    exact = small_run(tmp_path, small_params(**settings))
    variant = {"precision": "amp_fp16", "loss": loss, "micro_batch_size": 2}
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    run = small_run(tmp_path, small_params(variant, **settings), scaler)
    found, expected = run.gradients(), exact.gradients()
    norm = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    assert norm == pytest.approx(0.5, rel=1e-4), "the batch must have been clipped"
    assert distance(found, expected) < 0.005
    # What Adam really took: the fused kernel could still divide by the scale after the clipping.
    assert distance(first_moments(run), first_moments(exact)) < 0.005


@LOSSES
def test_several_steps_follow_fp32(tmp_path: Path, loss: str) -> None:
    exact = small_run(tmp_path, small_params())
    run = fp16_run(tmp_path, loss, init_scale=4096.0, growth_interval=2)
    for _ in range(6):
        assert float(run.step().loss) == pytest.approx(float(exact.step().loss), rel=2e-3)
    assert distance(weights(run.state), weights(exact.state)) < 0.01


def test_the_chunked_loss_is_told_what_backward_will_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GradScaler's scale over the target tokens of the whole batch, so that nothing is rounded twice."""
    told: list[float] = []

    def listening(*arguments: Any, expected_grad: torch.Tensor, **settings: Any) -> torch.Tensor:
        told.append(float(expected_grad))
        loss = chunked_loss(*arguments, expected_grad=expected_grad, **settings)
        loss.register_hook(lambda gradient: brought.append(float(gradient)))
        return loss

    brought: list[float] = []
    monkeypatch.setattr(step, "chunked_loss", listening)
    run = fp16_run(tmp_path, "chunked", init_scale=4096.0, micro_batch_size=2)
    targets = sum(batch.target_tokens for batch in run.micro_batches())
    run.step()
    assert told == brought == pytest.approx([4096 / targets] * 4)


def test_full_and_chunked_agree_under_the_scaler(tmp_path: Path) -> None:
    """Both get the same scale into the 16-bit part of backward, however many tokens share it."""
    runs = [fp16_run(tmp_path, loss, init_scale=4096.0, micro_batch_size=2) for loss in ("full", "chunked")]
    full, chunked = (run.gradients() for run in runs)
    assert distance(chunked, full) < 2e-3
