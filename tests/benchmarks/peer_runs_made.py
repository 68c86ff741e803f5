"""Runs as contenders would have written them, for tests of what is made from them."""

from typing import Any

from benchmarks.contenders.job import Result
from benchmarks.peer_runs import Entry, Failure
from benchmarks.peer_summary import Runs, summarise
from benchmarks.peer_works import WORKS

PARAMETERS = 1_000_000
STANDING = 16 * PARAMETERS


def result(
    tokens_per_second: float = 100.0, peak_bytes: int = STANDING + 4_000_000, **changes: Any
) -> Result:
    tokens = WORKS["W"].micro_batch_size * WORKS["W"].sequence_length
    values: dict[str, Any] = {
        "parameters": PARAMETERS,
        "warmup_seconds": [tokens / tokens_per_second + 7.0],
        "step_seconds": [tokens / tokens_per_second] * 3,
        "tokens_per_second": tokens_per_second,
        "first_step_after_seconds": 4.5,
        "losses": [9.0, 8.5, 8.25],
        "peak_bytes": peak_bytes,
        "reserved_bytes": None,
        "versions": {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"},
        "threads": 2,
        "switches": [],
        "ceiling_flops_per_second": None,
    }
    return Result(**values | changes)


def runs(
    contender: str,
    switched: bool,
    results: list[Result],
    failure: str | None = None,
    micro_batch_size: int = 8,
) -> Runs:
    reason = Failure(failure) if failure else None
    return Runs(Entry(contender, switched), results, reason, micro_batch_size)


def rows(every: list[Runs], work: str = "W", technique: str = "amp") -> list:
    return summarise(work, technique, every, PARAMETERS)
