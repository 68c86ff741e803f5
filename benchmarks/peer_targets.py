"""Where this project must stand against its peers, and where it was found."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.peer_summary import Row
from benchmarks.peer_works import PEERS, TITLES

SPEED_AS_IT_COMES = {"trainer": 1.25, "litgpt": 1.15, "tutorial": 1.5}
SPEED_SWITCHED = 1.05
EVERYTHING_OVER_FP32 = 2.0
MEMORY_BEYOND = {"amp": 0.6, "amp_recompute": 0.2}
"""Of W2, with the chunked loss: this project's memory beyond what must stand over Trainer's."""


@dataclass(frozen=True)
class Finding:
    """One ratio that has a target."""

    where: str
    value: float
    met: bool


@dataclass(frozen=True)
class Target:
    """One claim and all ratios it is about."""

    claim: str
    findings: tuple[Finding, ...]

    @property
    def missed(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.met]


def speed_target(row: Row) -> float:
    """What `row.speed_ratio` must reach."""
    return SPEED_SWITCHED if row.entry.switched else SPEED_AS_IT_COMES[row.entry.contender]


def targets(rows: Sequence[Row]) -> list[Target]:
    """Every claim of which `rows` hold at least one figure."""
    every = [*_speed(rows), _everything(rows), *_memory_beyond(rows), _whole_peak(rows)]
    return [target for target in every if target.findings]


def _speed(rows: Sequence[Row]) -> Iterator[Target]:
    for switched in (False, True):
        column = "with every switch on both sides" if switched else "as they come"
        for peer in PEERS:
            wanted = SPEED_SWITCHED if switched else SPEED_AS_IT_COMES[peer]
            yield Target(
                f"at least {wanted:g}× the tokens/s of {TITLES[peer]}, {column}",
                tuple(
                    Finding(f"{row.work} {row.technique}", ratio, ratio >= wanted)
                    for row in rows
                    if row.entry.contender == peer and row.entry.switched == switched and row.speed_ratio
                    for ratio in [row.speed_ratio.median]
                ),
            )


def _everything(rows: Sequence[Row]) -> Target:
    findings = []
    for work in dict.fromkeys(row.work for row in rows):
        own = _best(rows, work, "everything", "frugal", _speed_of, max)
        theirs = _best(rows, work, "fp32", "trainer", _speed_of, max)
        if own and theirs:
            findings.append(Finding(work, own / theirs, own / theirs >= EVERYTHING_OVER_FP32))
    claim = f"everything on: at least {EVERYTHING_OVER_FP32:g}× the tokens/s of Trainer's faster fp32"
    return Target(claim, tuple(findings))


def _memory_beyond(rows: Sequence[Row]) -> Iterator[Target]:
    for technique, limit in MEMORY_BEYOND.items():
        own = _best(rows, "W2", technique, "frugal", _beyond_of, min, switched_only=True)
        theirs = _best(rows, "W2", technique, "trainer", _beyond_of, min)
        findings: tuple[Finding, ...] = ()
        if own is not None and theirs is not None and theirs > 0:
            findings = (Finding(f"W2 {technique}", own / theirs, own / theirs <= limit),)
        yield Target(
            f"memory beyond what must stand: at most {limit:g}× Trainer's, its leaner column, "
            f"in W2 {technique} with the chunked loss",
            findings,
        )


def _whole_peak(rows: Sequence[Row]) -> Target:
    findings = []
    for work, technique in dict.fromkeys((row.work, row.technique) for row in rows):
        own = _best(rows, work, technique, "frugal", _peak_of, min, switched_only=True)
        peaks = [_best(rows, work, technique, peer, _peak_of, min) for peer in PEERS]
        leanest = min((peak for peak in peaks if peak is not None), default=None)
        if own is not None and leanest is not None:
            findings.append(Finding(f"{work} {technique}", own / leanest, own <= leanest))
    return Target("whole peak, with the chunked loss: at most the leanest peer's", tuple(findings))


def _best(
    rows: Sequence[Row],
    work: str,
    technique: str,
    contender: str,
    figure: Callable[[Row], float | None],
    choose: Callable[[list[float]], float],
    switched_only: bool = False,
) -> float | None:
    """The better of a contender's two columns; None where there is no figure."""
    figures = [
        figure(row)
        for row in rows
        if (row.work, row.technique, row.entry.contender) == (work, technique, contender)
        and (row.entry.switched or not switched_only)
    ]
    known = [value for value in figures if value is not None]
    return choose(known) if known else None


def _speed_of(row: Row) -> float | None:
    return row.tokens_per_second.median if row.tokens_per_second else None


def _peak_of(row: Row) -> float | None:
    return row.peak_bytes.median if row.peak_bytes else None


def _beyond_of(row: Row) -> float | None:
    return row.beyond_bytes
