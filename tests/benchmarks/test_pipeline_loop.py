"""The arithmetic of the loop's cost, and that its clocks are on functions that exist."""

import importlib

import pytest

from benchmarks.pipeline_loop import CLOCKS, PARTS, SAVE, STEP, WRITE, loop_cost
from benchmarks.pipeline_probe import Call, Moment, Report, put_clock

WARMUP = 4


def call(begin: float, end: float) -> Call:
    return Call(Moment(begin, 0.0), Moment(end, 0.0))


def report(**calls: list[Call]) -> Report:
    """Steps of 0.9 s at every second from 0 to 14, and these calls besides."""
    found: dict[str, list[Call]] = {name: [] for name in CLOCKS} | {
        STEP: [call(i, i + 0.9) for i in range(WARMUP + 11)]
    }
    return Report(Moment(0, 0), Moment(20, 0), 0.0, found | calls)


def test_what_is_in_no_step_is_outside() -> None:
    (track,) = PARTS["journal for MLflow"]
    cost = loop_cost(report(**{track: [call(WARMUP + 0.95, WARMUP + 0.98)]}))
    assert cost.steps == 10
    assert cost.seconds == pytest.approx(10)
    assert cost.step_seconds == pytest.approx(0.9)
    assert cost.outside["journal for MLflow"] == pytest.approx(0.03)
    assert cost.outside["the rest"] == pytest.approx(1.0 - 0.03)
    assert cost.outside_share == pytest.approx(0.1)


def test_calls_of_the_warmup_do_not_count() -> None:
    (track,) = PARTS["journal for MLflow"]
    cost = loop_cost(report(**{track: [call(1.95, 1.98), call(14.91, 14.95)]}))
    assert cost.outside["journal for MLflow"] == 0


def test_a_checkpoint_is_what_the_training_waits_and_is_slowed_down() -> None:
    steps = [call(i, i + 0.9) for i in range(WARMUP + 11)]
    # One save between two steps; the two steps beside its writing take 0.05 s more each.
    steps[6], steps[7] = call(6, 6.95), call(7, 7.95)
    cost = loop_cost(report(**{STEP: steps, SAVE: [call(5.92, 5.96)], WRITE: [call(5.96, 7.5)]}))
    assert cost.saves == 1
    assert cost.saving_seconds == pytest.approx(0.04)
    assert cost.writing_seconds == pytest.approx(1.54)
    assert cost.slowdown_seconds == pytest.approx(0.1)
    assert cost.checkpoint_share(14.0) == pytest.approx(0.14 / 14)
    assert cost.outside_share == pytest.approx((1.0 - 0.1 - 0.04) / 10)


@pytest.mark.parametrize("name", CLOCKS)
def test_every_clocked_function_exists(name: str) -> None:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    assert callable(found)


def test_a_clock_sees_a_call_and_what_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.setattr(json, "loads", json.loads)  # put back at the end
    calls = put_clock("json:loads", since=0.0)
    assert json.loads("[1]") == [1]
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads("")
    assert len(calls) == 2
    assert all(call.seconds > 0 for call in calls)


def test_a_function_that_is_gone_is_said() -> None:
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        put_clock("json:nothing_of_that_name", since=0.0)
