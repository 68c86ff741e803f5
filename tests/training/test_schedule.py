"""Linear warm-up and cosine, counted in steps that changed the weights."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.params import TrainingParams
from stages.training.schedule import WarmupCosine, learning_rate_at

CPU = torch.device("cpu")


def training(warmup_steps: int, num_steps: int, ratio: float = 0.1, peak: float = 0.01) -> TrainingParams:
    return TrainingParams(
        sequence_length=4,
        global_batch_size=2,
        token_budget=8 * num_steps,
        learning_rate=peak,
        min_learning_rate_ratio=ratio,
        warmup_steps=warmup_steps,
    )


def rate(step: int, params: TrainingParams) -> float:
    return float(learning_rate_at(torch.tensor(step), params))


def test_values_at_the_corners() -> None:
    params = training(warmup_steps=4, num_steps=21)
    assert [rate(k, params) for k in range(5)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert rate(12, params) == pytest.approx(0.01 * 0.55)  # half-way from 4 to 20: mean of peak and floor
    assert rate(8, params) == pytest.approx(0.01 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert rate(20, params) == pytest.approx(0.001)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    params = training(warmup_steps=0, num_steps=10, ratio=0.0)
    assert rate(0, params) == pytest.approx(0.01)
    assert rate(9, params) == pytest.approx(0, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    num_steps=st.integers(2, 200),
    warmup_share=st.floats(0, 0.99),
    ratio=st.floats(0, 1),
    peak=st.floats(1e-6, 1.0),
)
def test_rises_to_the_peak_and_falls_to_the_floor(
    num_steps: int, warmup_share: float, ratio: float, peak: float
) -> None:
    warmup = min(int(warmup_share * num_steps), num_steps - 2)
    params = training(warmup, num_steps, ratio, peak)
    rates = [rate(k, params) for k in range(num_steps + 3)]
    assert max(rates) == pytest.approx(peak, rel=1e-6)
    assert all(earlier < later for earlier, later in itertools.pairwise(rates[:warmup]))
    falling = rates[warmup:]
    assert all(earlier >= later for earlier, later in itertools.pairwise(falling))
    # The last step has the floor, and so has whatever comes after it.
    for k in range(num_steps - 1, num_steps + 3):
        assert rates[k] == pytest.approx(ratio * peak, rel=1e-5, abs=1e-12)


def test_a_skipped_step_does_not_advance() -> None:
    schedule = WarmupCosine(training(warmup_steps=4, num_steps=20), CPU)
    the_tensor = schedule.learning_rate
    assert float(the_tensor) == pytest.approx(0.0025)
    schedule.advance(torch.tensor(True))
    assert (int(schedule.steps_taken), float(the_tensor)) == (0, pytest.approx(0.0025))
    schedule.advance(torch.tensor(False))
    assert (int(schedule.steps_taken), float(the_tensor)) == (1, pytest.approx(0.005))
    schedule.advance(None)
    assert (int(schedule.steps_taken), float(the_tensor)) == (2, pytest.approx(0.0075))
    assert schedule.learning_rate is the_tensor, "the optimizer holds it; it is written to, not replaced"


def test_restore_is_where_advancing_leads() -> None:
    params = training(warmup_steps=4, num_steps=20)
    walked, restored = WarmupCosine(params, CPU), WarmupCosine(params, CPU)
    the_tensor = restored.learning_rate
    for _ in range(11):
        walked.advance(None)
    restored.restore(11)
    assert torch.equal(restored.learning_rate, walked.learning_rate)
    assert torch.equal(restored.steps_taken, walked.steps_taken)
    assert restored.learning_rate is the_tensor
