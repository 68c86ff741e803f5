"""What stands around the step: the share of a run that is spent outside of `train_step`, and on what.

Measured inside one run, between its own clocks: two runs of the same work differ by more than that.
"""

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.pipeline_checkout import Checkout
from benchmarks.pipeline_growth import Curve
from benchmarks.pipeline_probe import Call, Report

STEP = "stages.training.loop:train_step"
SAVE = "stages.training.checkpoint_store:CheckpointStore.save"
WRITE = "stages.training.checkpoint_store:CheckpointStore._write"
_RECORD = "stages.train_results:TrainRecord.to_dict"
PARTS = {
    "taking the batch": ("stages.data.sequences:PackedSequences.micro_batch",),
    "looking for bad numbers": ("stages.training.loop:check_numbers",),
    "journal for MLflow": ("stages.train:track",),
    "progress": ("stages.progress:TrainingProgress.show",),
    "checkpoint": (SAVE, _RECORD),
}
CLOCKS = (STEP, WRITE, *(name for names in PARTS.values() for name in names))

_WARMUP_STEPS = 4
"""The first compiles and grows caches, the second is profiled."""


@dataclass(frozen=True)
class LoopCost:
    """Of the steps after the warm-up, but for the last."""

    steps: int
    step_seconds: float
    """Median of the steps while no checkpoint was written."""
    seconds: float
    """Of all, with what stands around them."""
    outside: dict[str, float]
    """Seconds outside of the steps by part; `the rest` makes them whole."""
    saves: int
    saving_seconds: float
    """The training waited so long for each save."""
    writing_seconds: float
    """Beside the training, each."""
    slowdown_seconds: float
    """By so much longer than the median took the steps beside the writing, each save."""
    sender_cpu_seconds: float
    """Of MLflow's process, at the lowest priority, in the whole run."""

    @property
    def outside_share(self) -> float:
        """Of all the time; saving left out."""
        return sum(seconds for part, seconds in self.outside.items() if part != "checkpoint") / self.seconds

    def checkpoint_share(self, every_seconds: float) -> float:
        """Of a run that saves so often, with what the writing slows down."""
        return (self.saving_seconds + max(self.slowdown_seconds, 0.0)) / every_seconds


def loop_cost(report: Report) -> LoopCost:
    steps = report.calls[STEP][_WARMUP_STEPS:]
    window = steps[0].begin.wall, steps[-1].begin.wall
    steps = steps[:-1]
    saves = _within(report.calls[SAVE], window)
    writes = _within(report.calls[WRITE], window)
    outside = {
        part: sum(_length(_within((call for name in names for call in report.calls[name]), window)))
        for part, names in PARTS.items()
    }
    around = window[1] - window[0] - sum(_length(steps))
    alone = [step for step in steps if not any(_overlap(step, write) for write in writes)]
    beside = [step for step in steps if step not in alone]
    usual = statistics.median(_length(alone or steps))
    per_save = 1 / max(len(saves), 1)
    return LoopCost(
        steps=len(steps),
        step_seconds=usual,
        seconds=window[1] - window[0],
        outside=outside | {"the rest": around - sum(outside.values())},
        saves=len(saves),
        saving_seconds=outside["checkpoint"] * per_save,
        writing_seconds=sum(_length(writes)) * per_save,
        slowdown_seconds=(sum(_length(beside)) - usual * len(beside)) * per_save,
        sender_cpu_seconds=report.children_cpu_seconds,
    )


def measure_loop(checkout: Checkout, steps: int, saves: int) -> LoopCost:
    """One run of the first variant, MLflow and all, that saves so many times."""
    params = checkout.params()
    checkout.set_params(with_steps(params, steps) | {"checkpoints": _every(steps // (saves + 1))})
    report = checkout.train(CLOCKS)
    checkout.set_params(params)
    return loop_cost(report)


def measure_long_run(checkout: Checkout, steps: int) -> Curve:
    """Milliseconds around a step, by the steps done before: of a very small model that logs at every step."""
    params = checkout.params()
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
    short = {"sequence_length": 32, "global_batch_size": 2, "log_every_steps": 1}
    tiny = params | {"model": params["model"] | small, "training": params["training"] | short}
    tiny["variants"] = {"baseline": params["variants"]["baseline"] | {"micro_batch_size": 2}}
    checkout.set_params(with_steps(tiny, steps) | {"checkpoints": _every(None)})
    calls = checkout.train([STEP]).calls[STEP]
    checkout.set_params(params)
    around = [later.begin.wall - earlier.end.wall for earlier, later in itertools.pairwise(calls)]
    part = steps // 16
    windows = [around[end - part : end] for end in (2 * part, 4 * part, 8 * part, 16 * part - 1)]
    ends = (2 * part, 4 * part, 8 * part, 16 * part)
    medians = [1000 * statistics.median(window) for window in windows]
    costs = {float(end): [cost] for end, cost in zip(ends, medians, strict=True)}
    return Curve("around a step", "ms", costs, is_flat=True)


def with_steps(params: dict[str, Any], steps: int) -> dict[str, Any]:
    """The same params with a training of so many optimizer steps."""
    training = dict(params["training"])
    training["token_budget"] = steps * training["global_batch_size"] * training["sequence_length"]
    training["warmup_steps"] = min(training["warmup_steps"], steps // 10)
    return params | {"training": training}


def _every(steps: int | None) -> dict[str, Any]:
    return {"every_minutes": None, "every_steps": steps, "keep": 2}


def _within(calls: Iterable[Call], window: tuple[float, float]) -> list[Call]:
    return [call for call in calls if window[0] <= call.begin.wall < window[1]]


def _length(calls: Iterable[Call]) -> list[float]:
    return [call.seconds for call in calls]


def _overlap(a: Call, b: Call) -> bool:
    return a.begin.wall < b.end.wall and b.begin.wall < a.end.wall
