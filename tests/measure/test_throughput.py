"""The step timer, on invented clock readings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.measure import StepTimer


def test_warm_up_and_disturbed_intervals_are_recorded_but_not_counted() -> None:
    timer = StepTimer(warmup_intervals=1)
    timer.start(100.0, step=0)
    timer.lap(130.0, step=10, tokens=1000)  # compiles: 30 s
    timer.lap(132.0, step=20, tokens=1000)
    timer.lap(152.0, step=30, tokens=1000, disturbed=True)
    timer.lap(154.0, step=40, tokens=1000)
    summary = timer.summary()
    assert summary.tokens_per_second == 500.0
    assert summary.median_step_seconds == pytest.approx(0.2)
    assert summary.steps_counted == 20
    assert not summary.includes_disturbed
    assert [(step, seconds) for step, seconds, _ in timer.rows()] == [(10, 30), (20, 32), (30, 52), (40, 54)]
    assert timer.elapsed_seconds == 54


def test_median_counts_steps_not_intervals() -> None:
    """Nine steps of 1 s in one interval outweigh two single steps of 5 s."""
    timer = StepTimer(warmup_intervals=0)
    timer.start(0.0, step=0)
    timer.lap(5.0, step=1, tokens=10)
    timer.lap(10.0, step=2, tokens=10)
    timer.lap(19.0, step=11, tokens=90)
    assert timer.summary().median_step_seconds == 1.0
    assert timer.summary().tokens_per_second == 10.0


def test_a_short_run_says_that_it_counts_its_warm_up() -> None:
    timer = StepTimer(warmup_intervals=3)
    timer.start(0.0, step=0)
    timer.lap(2.0, step=1, tokens=8)
    assert timer.summary().includes_disturbed
    assert timer.summary().tokens_per_second == 4.0


def test_a_resumed_run_continues_the_clock() -> None:
    first = StepTimer(warmup_intervals=1)
    first.start(0.0, step=0)
    first.lap(40.0, step=25, tokens=1)
    first.lap(60.0, step=50, tokens=200)
    timer = StepTimer(warmup_intervals=1, before=first.intervals)
    timer.start(1000.0, step=50)
    assert timer.elapsed_seconds == 60.0
    timer.lap(1005.0, step=60, tokens=1)  # the restart warms up too
    timer.lap(1010.0, step=70, tokens=100)
    assert [row[:2] for row in timer.rows()] == [(25, 40.0), (50, 60.0), (60, 65.0), (70, 70.0)]
    assert timer.summary().steps_counted == 25 + 10


def test_misuse_is_refused() -> None:
    timer = StepTimer()
    with pytest.raises(ValueError, match=r"before StepTimer\.start"):
        timer.lap(1.0, step=1, tokens=1)
    timer.start(1.0, step=5)
    with pytest.raises(ValueError, match="without an interval"):
        timer.summary()
    with pytest.raises(ValueError, match="step 5 to 5"):
        timer.lap(2.0, step=5, tokens=1)
    with pytest.raises(ValueError, match="advance"):
        timer.lap(1.0, step=6, tokens=1)


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e3), st.integers(1, 9), st.integers(1, 10**6), st.booleans()), min_size=1
    )
)
def test_summary_lies_within_the_intervals(laps: list[tuple[float, int, int, bool]]) -> None:
    timer = StepTimer()
    timer.start(0.0, step=0)
    now, done = 0.0, 0
    for seconds, steps, tokens, disturbed in laps:
        now, done = now + seconds, done + steps
        timer.lap(now, done, tokens, disturbed)
    rates = [rate for _, _, rate in timer.rows()]
    assert min(rates) <= timer.summary().tokens_per_second <= max(rates)
    assert timer.elapsed_seconds == pytest.approx(sum(lap[0] for lap in laps))
    assert timer.rows()[-1][0] == sum(lap[1] for lap in laps)
