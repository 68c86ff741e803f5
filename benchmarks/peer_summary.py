"""From the runs of one work and technique to medians and ratios."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.contenders.job import Result
from benchmarks.peer_runs import Entry, Failure
from benchmarks.peer_works import TECHNIQUES, WORKS
from stages.measure.flops import model_flops_per_token
from stages.params import ModelParams

LOSS_TOLERANCE = {"fp32": 2e-4, "tf32": 2e-3, "amp_bf16": 2e-3}
"""Largest relative difference between two contenders' losses of the same step. fp32: other kernels add in
another order, and a step magnifies that. 16 bits: a contender may round what another keeps in fp32."""
BYTES_PER_PARAMETER = 16
"""What must stand in fp32 or autocast AdamW: weight, gradient and two moments."""


@dataclass
class Runs:
    """All runs of one entry."""

    entry: Entry
    results: list[Result] = field(default_factory=list)
    failure: Failure | None = None
    micro_batch_size: int = 0


@dataclass(frozen=True)
class Spread:
    """Median with the smallest and the largest."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Row:
    """One entry in the table."""

    work: str
    technique: str
    entry: Entry
    micro_batch_size: int
    failure: str | None
    tokens_per_second: Spread | None = None
    peak_bytes: Spread | None = None
    beyond_bytes: float | None = None
    """Median peak less what must stand."""
    ceiling_share: float | None = None
    compile_seconds: float | None = None
    """Of the first round: what its first steps took beyond steady ones."""
    first_step_after_seconds: Spread | None = None
    speed_ratio: Spread | None = None
    """This project's speed over this entry's, round by round; both as they come, or both switched on."""
    peak_ratio: float | None = None
    """This project's median peak over this entry's, in the same column."""
    beyond_ratio: float | None = None
    """The same of the memory beyond what must stand."""
    loss_difference: float | None = None
    """Largest relative difference of a step's loss from that of the first entry of the table."""
    switches: tuple[str, ...] = ()
    rounds: int = 0
    """How many runs the medians are of."""


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def summarise(work: str, technique: str, runs: Sequence[Runs], parameters: int) -> list[Row]:
    """One row for each entry, with the entries' own failures and those of unequal work as words.

    Args:
        runs: of the entries of one work and technique.
        parameters: what every model must have.
    """
    own = {
        one.entry.switched: one
        for one in runs
        if one.entry.contender == "frugal" and one.results and one.failure is None
    }
    first = next((one for one in runs if one.results and one.failure is None), None)
    ceilings = [
        result.ceiling_flops_per_second
        for one in runs
        for result in one.results
        if result.ceiling_flops_per_second is not None
    ]
    ceiling = statistics.median(ceilings) if ceilings else None
    return [_row(work, technique, one, own, first, ceiling, parameters) for one in runs]


def _row(
    work: str,
    technique: str,
    runs: Runs,
    own: dict[bool, Runs],
    first: Runs | None,
    ceiling: float | None,
    parameters: int,
) -> Row:
    reason = runs.failure.reason if runs.failure else None
    if reason is None:
        reason = unequal_work(runs, first, TECHNIQUES[technique].precision, parameters)
    if reason is not None or not runs.results:
        return Row(work, technique, runs.entry, runs.micro_batch_size, reason or "was not run")
    speed = spread([result.tokens_per_second for result in runs.results])
    peak = spread([float(result.peak_bytes) for result in runs.results])
    standing = BYTES_PER_PARAMETER * parameters
    beyond = peak.median - standing
    speed_ratio = peak_ratio = beyond_ratio = None
    reference = own.get(runs.entry.switched)
    if reference is not None and reference is not runs:
        speed_ratio = round_ratios(reference.results, runs.results)
        own_peak = statistics.median(result.peak_bytes for result in reference.results)
        peak_ratio = own_peak / peak.median
        beyond_ratio = (own_peak - standing) / beyond if beyond > 0 else None
    flops = flops_per_token(work)
    return Row(
        work=work,
        technique=technique,
        entry=runs.entry,
        micro_batch_size=runs.micro_batch_size,
        failure=None,
        tokens_per_second=speed,
        peak_bytes=peak,
        beyond_bytes=beyond,
        ceiling_share=speed.median * flops / ceiling if ceiling else None,
        compile_seconds=compile_seconds(runs.results[0]) if TECHNIQUES[technique].compiled else None,
        first_step_after_seconds=spread([result.first_step_after_seconds for result in runs.results]),
        speed_ratio=speed_ratio,
        peak_ratio=peak_ratio,
        beyond_ratio=beyond_ratio,
        loss_difference=loss_difference(runs, first),
        switches=tuple(runs.results[0].switches),
        rounds=len(runs.results),
    )


def flops_per_token(work: str) -> int:
    """Of the model, as stages.measure.flops counts them: what is recomputed does not count."""
    shape = WORKS[work]
    return model_flops_per_token(ModelParams(**shape.model), shape.vocab_size, shape.sequence_length)


def round_ratios(own: Sequence[Result], other: Sequence[Result]) -> Spread:
    """Ratios of the same round: what slowed the machine for a while slowed both."""
    pairs = zip(own, other, strict=False)
    return spread([mine.tokens_per_second / theirs.tokens_per_second for mine, theirs in pairs])


def compile_seconds(result: Result) -> float:
    """What the first steps took beyond what as many steady steps take."""
    steady = statistics.median(result.step_seconds)
    return max(sum(seconds - steady for seconds in result.warmup_seconds), 0.0)


def unequal_work(runs: Runs, first: Runs | None, precision: str, parameters: int) -> str | None:
    """In words, why these runs did not do the work of the others; None where they did."""
    for result in runs.results:
        if result.parameters != parameters:
            return f"has {result.parameters:,} parameters and the work has {parameters:,}"
        if first is None:
            continue
        torch, wanted_torch = result.versions["torch"], first.results[0].versions["torch"]
        if torch != wanted_torch:
            return f"runs on torch {torch} and {first.entry.name} on {wanted_torch}"
        pairs = zip(result.losses, first.results[0].losses, strict=True)
        for step, (loss, wanted) in enumerate(pairs, start=1):
            if not abs(loss - wanted) <= LOSS_TOLERANCE[precision] * abs(wanted):
                return f"its loss of step {step} is {loss:.4f} and {first.entry.name}'s {wanted:.4f}"
    return None


def loss_difference(runs: Runs, first: Runs | None) -> float | None:
    """The largest relative one over all rounds and steps."""
    if first is None:
        return None
    wanted = first.results[0].losses
    return max(
        abs(loss - expected) / abs(expected)
        for result in runs.results
        for loss, expected in zip(result.losses, wanted, strict=True)
    )
