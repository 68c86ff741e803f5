"""One stage in a process of its own, with a clock on some of its functions.

    python -m benchmarks.pipeline_probe [--clock MODULE:NAME …] [--set MODULE:NAME=NUMBER …]
                                        REPORT SINCE MODULE [ARGUMENTS]

Calls MODULE's `main` as `python -m MODULE ARGUMENTS` would, and writes REPORT (JSON): all times are seconds
since the process was started, which was when the clock of the machine (CLOCK_MONOTONIC) showed SINCE.
"""

import argparse
import importlib
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Moment:
    """Seconds since the process was started."""

    wall: float
    cpu: float
    """Of this process, all threads together."""


@dataclass(frozen=True)
class Call:
    """One call of a clocked function, in any thread."""

    begin: Moment
    end: Moment

    @property
    def seconds(self) -> float:
        return self.end.wall - self.begin.wall


@dataclass(frozen=True)
class Report:
    """What one process did."""

    ready: Moment
    """Everything is imported; `main` begins."""
    ended: Moment
    children_cpu_seconds: float
    """Of the processes that it waited for: git, MLflow's sender."""
    calls: dict[str, list[Call]] = field(default_factory=dict)
    """In the order in which they ended, by `module:name`."""

    @classmethod
    def read(cls, path: Path) -> Self:
        saved = json.loads(path.read_text())
        calls = {
            name: [Call(Moment(**call["begin"]), Moment(**call["end"])) for call in calls]
            for name, calls in saved["calls"].items()
        }
        moments = {name: Moment(**saved[name]) for name in ("ready", "ended")}
        return cls(**saved | moments | {"calls": calls})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_probe", description=__doc__)
    parser.add_argument("--clock", action="append", default=[])
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("report", type=Path)
    parser.add_argument("since", type=float)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    stage = importlib.import_module(options.module)
    calls = {name: put_clock(name, options.since) for name in options.clock}
    for assignment in options.set:
        name, _, number = assignment.partition("=")
        owner, attribute, _ = _find(name)
        setattr(owner, attribute, float(number))
    ready = _now(options.since)
    sys.argv = [options.module, *options.arguments]
    status: int = stage.main()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = Report(ready, _now(options.since), children.ru_utime + children.ru_stime, calls)
    options.report.write_text(json.dumps(asdict(report)))
    return status


def put_clock(name: str, since: float) -> list[Call]:
    """Put a clock on `module:name` or `module:Class.name`; returns the list that its calls will fill.

    On a GPU the device is waited for before and after, so that a call is charged what it began.

    Raises:
        AttributeError: there is no such function.
    """
    owner, attribute, clocked = _find(name)
    calls: list[Call] = []

    @wraps(clocked)
    def call(*arguments: Any, **options: Any) -> Any:
        _wait_for_gpu()
        began = _now(since)
        try:
            return clocked(*arguments, **options)
        finally:
            _wait_for_gpu()
            calls.append(Call(began, _now(since)))

    setattr(owner, attribute, call)
    return calls


def _find(name: str) -> tuple[Any, str, Any]:
    """The module or class that has it, its name there, and itself."""
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, attribute, getattr(owner, attribute)


def _wait_for_gpu() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _now(since: float) -> Moment:
    return Moment(time.clock_gettime(time.CLOCK_MONOTONIC) - since, time.process_time())


if __name__ == "__main__":
    sys.exit(main())
