"""The loop's rows, its end, and that stopping between two rows changes none of them."""

from dataclasses import asdict
from pathlib import Path

import pytest

from stages.measure.compilation import CompileWatch
from stages.measure.throughput import StepTimer
from stages.training.checkpoint import load_checkpoint, save_checkpoint
from stages.training.loop import CurveRow, Measurements, training_steps
from tests.training.small_run import SmallRun, small_params, small_run


def measurements() -> Measurements:
    return Measurements(StepTimer(), CompileWatch(enabled=False))


def rows_of(run: SmallRun, taken: Measurements | None = None) -> list[CurveRow]:
    steps = training_steps(run.state, run.sequences, run.params, "v", run.policy, taken or measurements())
    return [row for row in steps if row is not None]


@pytest.mark.parametrize(
    ("num_steps", "sequences"), [(1, "packed"), (2, "packed"), (4, "padded"), (11, "padded"), (11, "packed")]
)
def test_rows_are_what_the_steps_did(tmp_path: Path, num_steps: int, sequences: str) -> None:
    params = small_params(
        {"micro_batch_size": 4},
        token_budget=num_steps * 8 * 16,
        warmup_steps=0,
        log_every_steps=4,
        sequences=sequences,
    )
    by_hand = small_run(tmp_path, params)
    losses, rates, norms, tokens = [], [], [], []
    for _ in range(num_steps):
        rates.append(float(by_hand.state.schedule.learning_rate))
        outcome = by_hand.step()
        losses.append(float(outcome.loss))
        norms.append(float(outcome.grad_norm))
        tokens.append(by_hand.state.tokens)

    taken = measurements()
    rows = rows_of(small_run(tmp_path, params), taken)
    assert [row.step for row in rows] == sorted({*range(4, num_steps + 1, 4), num_steps})
    start = 0
    for row in rows:
        since = losses[start : row.step]
        assert row.loss == pytest.approx(sum(since) / len(since), rel=1e-6)
        assert row.learning_rate == rates[row.step - 1]
        assert row.grad_norm == norms[row.step - 1]
        assert row.tokens == tokens[row.step - 1]
        start = row.step
    assert taken.peak is not None and taken.peak.bytes > 0
    assert taken.timer.rows()[-1][0] == num_steps


def test_the_last_step_of_a_run_is_the_budgets(tmp_path: Path) -> None:
    params = small_params(token_budget=5 * 8 * 16 - 1, log_every_steps=100)
    run = small_run(tmp_path, params)
    (row,) = rows_of(run)
    assert (row.step, run.state.step) == (5, 5)
    assert rows_of(run) == [], "a finished run has nothing left to do"


@pytest.mark.parametrize(
    ("precision", "stop_after"), [("fp32", 1), ("fp32", 6), ("amp_fp16", 4), ("amp_fp16", 7)]
)
def test_stopped_between_rows_and_continued(tmp_path: Path, precision: str, stop_after: int) -> None:
    """The curve is a result: a resumed run writes the rows that an uninterrupted one does."""
    params = small_params(
        {"micro_batch_size": 4, "precision": precision},
        token_budget=11 * 8 * 16,
        log_every_steps=4,
        warmup_steps=2,
    )
    expected = [asdict(row) for row in rows_of(small_run(tmp_path, params))]

    first = small_run(tmp_path, params)
    rows: list[CurveRow] = []
    # What the loop does up to the step it was stopped at.
    while first.state.step < stop_after:
        rate, steps = float(first.state.schedule.learning_rate), first.state.step % 4 + 1
        outcome = first.step()
        if first.state.step % 4 == 0:
            loss = float(first.state.loss_since_row) / steps
            rows.append(CurveRow(first.state.step, first.state.tokens, loss, rate, float(outcome.grad_norm)))
            first.state.loss_since_row.zero_()
            first.state.losses_since_row.zero_()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_checkpoint(first.state, folder)

    second = small_run(tmp_path, params)
    load_checkpoint(second.state, folder)
    rows += rows_of(second)
    assert [asdict(row) for row in rows] == expected
