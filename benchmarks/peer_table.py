"""The page of the side-by-side runs, in Markdown."""

import datetime
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.peer_runs import ROOT, SWITCHED_ENVIRONMENT, Machine
from benchmarks.peer_summary import BYTES_PER_PARAMETER, LOSS_TOLERANCE, Row, Spread
from benchmarks.peer_targets import Target, speed_target, targets
from benchmarks.peer_works import PEERS, TECHNIQUES, TITLES, WORKS, Work
from stages.measure.hardware import describe_device

NONE = "–"
_COLUMNS = (
    ("technique", "---"),
    ("contender", "---"),
    ("tokens/s", "---:"),
    ("this project is", "---:"),
    ("of the ceiling", "---:"),
    ("peak MiB", "---:"),
    ("beyond MiB", "---:"),
    ("ours beyond", "---:"),
    ("compile s", "---:"),
    ("first step after s", "---:"),
)


@dataclass(frozen=True)
class Conditions:
    """What the figures hold for."""

    device: str
    kind: str
    threads: int
    memory_bytes: int
    torch: str
    commit: str
    date: str
    warmup_steps: int
    steps: int
    load: float
    """Of the machine before the first run: processes that wanted a core."""


def conditions(machine: Machine, warmup_steps: int, steps: int, load: float) -> Conditions:
    device = describe_device(torch.device(machine.device))
    return Conditions(
        device=device.name,
        kind=device.kind,
        threads=machine.threads,
        memory_bytes=device.memory_bytes,
        torch=torch.__version__,
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        warmup_steps=warmup_steps,
        steps=steps,
        load=load,
    )


def result_name(page: Conditions) -> str:
    """Of the files, from the device: `amd-epyc-2-threads`, `nvidia-h100-80gb-hbm3`."""
    words = page.device if page.kind == "cuda" else f"{page.device} {page.threads} threads"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def write_page(
    path: Path, rows: Sequence[Row], parameters: dict[str, int], versions: dict[str, str], page: Conditions
) -> None:
    """
    Args:
        parameters: of each work that `rows` are about.
        versions: of the contenders' packages, by name.
    """
    parts = [_head(page, rows, versions), _standing(rows)]
    for work in parameters:
        own = [row for row in rows if row.work == work]
        if own:
            parts += [_work_heading(WORKS[work], parameters[work]), _ratios(own), _table(own)]
    parts += [_reading(page, rows), _switches(page, rows)]
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def rounds(rows: Sequence[Row]) -> str:
    """In words: where hours of runs were cut short, some rows have more than others."""
    counts = [row.rounds for row in rows if row.rounds] or [0]
    fewest, most = min(counts), max(counts)
    return f"{f'{fewest} to ' * (fewest < most)}{most} round{'s' * (most != 1)}"


def _rows_of_most_rounds(rows: Sequence[Row]) -> str:
    """Which they are, where not all are."""
    most = max((row.rounds for row in rows), default=0)
    names = dict.fromkeys(f"{row.work} {row.technique}" for row in rows if row.rounds == most)
    has_fewer = any(0 < row.rounds < most for row in rows)
    return f" ({most} of {', '.join(names)})" if has_fewer else ""


def _head(page: Conditions, rows: Sequence[Row], versions: dict[str, str]) -> str:
    cpu = f", {page.threads} threads" if page.kind == "cpu" else ""
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    name = result_name(page)
    return f"""# This project and its peers on {page.device}{cpu}

Made by `python -m benchmarks.peers` (`make bench`) on {page.date}, commit {page.commit}.
{page.device}{cpu}, {page.memory_bytes / 2**30:.0f} GiB; torch {page.torch}, {named}.
{rounds(rows)}{_rows_of_most_rounds(rows)}; {page.steps} counted steps after {page.warmup_steps},
of 4 micro-batches a quarter as many; load of the machine before: {page.load:.1f}.

![tokens/s and peak memory]({name}.png)"""


def _standing(rows: Sequence[Row]) -> str:
    lines = [
        "## Where it must stand",
        "",
        "| target | met in | lowest and highest | missed |",
        "| --- | ---: | ---: | --- |",
    ]
    for target in targets(rows):
        values = [finding.value for finding in target.findings]
        met = f"{len(values) - len(target.missed)} of {len(values)}"
        extremes = f"{min(values):.2f}× to {max(values):.2f}×"
        missed = ", ".join(f"{finding.where} {finding.value:.2f}×" for finding in target.missed) or NONE
        lines.append(f"| {target.claim} | {met} | {extremes} | {missed} |")
    return "\n".join(lines)


def _work_heading(work: Work, parameters: int) -> str:
    shape = work.model
    standing = BYTES_PER_PARAMETER * parameters / 2**20
    return f"""## Work {work.name}

Vocabulary {work.vocab_size:,}, hidden {shape["hidden_size"]}, {shape["num_hidden_layers"]} layers,
{shape["num_attention_heads"]} heads, {shape["num_key_value_heads"]} KV heads, intermediate
{shape["intermediate_size"]:,}; sequence {work.sequence_length}, micro-batch {work.micro_batch_size}.
{parameters:,} parameters: {standing:,.0f} MiB must stand (weights, gradients and AdamW's moments in fp32)."""


def _ratios(rows: Sequence[Row]) -> str:
    """One line for each technique: the speed ratios alone."""
    entries = [(peer, switched) for switched in (False, True) for peer in PEERS]
    by_place = {(row.technique, row.entry.contender, row.entry.switched): row for row in rows}
    used = [entry for entry in entries if any((name, *entry) in by_place for name in TECHNIQUES)]
    if not used:
        return ""
    heads = [f"{TITLES[peer]}{' +' if switched else ''}" for peer, switched in used]
    lines = [
        "This project's tokens/s over its peers', median of the rounds; ✗: below the target.",
        "",
        f"| technique | {' | '.join(heads)} |",
        f"| --- | {' | '.join('---:' for _ in heads)} |",
    ]
    for technique in dict.fromkeys(row.technique for row in rows):
        cells = [_ratio_cell(by_place.get((technique, *entry))) for entry in used]
        lines.append(f"| {technique} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio_cell(row: Row | None) -> str:
    if row is None or row.speed_ratio is None:
        return NONE
    ratio = row.speed_ratio.median
    return f"**{ratio:.2f}×**" if ratio >= speed_target(row) else f"{ratio:.2f}× ✗"


def _table(rows: Sequence[Row]) -> str:
    lines = [
        f"| {' | '.join(name for name, _ in _COLUMNS)} |",
        f"| {' | '.join(rule for _, rule in _COLUMNS)} |",
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    contender = f"{TITLES[row.entry.contender]}{' +' if row.entry.switched else ''}"
    if row.micro_batch_size != WORKS[row.work].micro_batch_size:
        contender += f" (micro-batch {row.micro_batch_size})"
    if row.failure is not None:
        # A bar in the words would end the cell.
        words = row.failure.replace("|", "/")
        return [row.technique, contender, words, *[NONE] * (len(_COLUMNS) - 3)]
    return [
        row.technique,
        contender,
        _spread(row.tokens_per_second, "{:,.0f}"),
        _spread(row.speed_ratio, "{:.2f}×"),
        f"{row.ceiling_share:.0%}" if row.ceiling_share is not None else NONE,
        _spread(row.peak_bytes, "{:,.0f}", 2**20),
        f"{row.beyond_bytes / 2**20:,.0f}" if row.beyond_bytes is not None else NONE,
        f"{row.beyond_ratio:.2f}×" if row.beyond_ratio is not None else NONE,
        f"{row.compile_seconds:.0f}" if row.compile_seconds is not None else NONE,
        _spread(row.first_step_after_seconds, "{:.1f}"),
    ]


def _spread(spread: Spread | None, form: str, unit: float = 1.0) -> str:
    if spread is None:
        return NONE
    median, lowest, highest = (
        form.format(value / unit) for value in (spread.median, spread.lowest, spread.highest)
    )
    return median if lowest == median == highest else f"{median} [{lowest} to {highest}]"


def _reading(page: Conditions, rows: Sequence[Row]) -> str:
    memory = (
        "highest resident set of the process since the model was begun, less what stood before"
        if page.kind == "cpu"
        else "the allocator's highest since the model was begun, less what stood before"
    )
    tolerance = ", ".join(f"{name} {value:g}" for name, value in LOSS_TOLERANCE.items())
    return f"""## How to read it

- Each contender trains the same weights on the same sequences in the same order, in a process of its own.
  The runs take turns (A B C, B C A, …); figures are medians with the lowest and highest of the rounds.
- **+**: with every switch of one line that helps, listed below. Without: as it comes, with the technique's
  own switch alone.
- *this project is*: its tokens/s over this contender's in the same round and the same column: both as they
  come, or both with their switches. *ours beyond*: the same for the memory beyond what must stand.
- *peak*: {memory}.
  *beyond*: less weights, gradients and moments (16 bytes a parameter).
- *of the ceiling*: model FLOPs (recomputed ones do not count) over those of the fastest matrix product in
  the same format, measured after each of this project's runs.
- *compile s*: what the first steps took beyond steady ones, in the first round. The cache is empty before
  the first technique with compile; the next ones find in it what they have in common with it.
  *first step after*: from the start of the process to the beginning of the first step. litgpt checks its
  validation before that, so there it compiles once within this time.
- Every contender has as many parameters as its work, and the losses of its first steps (up to 5) are those
  of the table's first row but for rounding (relative: {tolerance}); else its row says so
  and has no figures. Largest difference found: {_largest_difference(rows)}."""


def _largest_difference(rows: Sequence[Row]) -> str:
    found = [row.loss_difference for row in rows if row.loss_difference is not None]
    return f"{max(found):.1e}" if found else NONE


def _switches(page: Conditions, rows: Sequence[Row]) -> str:
    """What each contender had switched on, in any technique."""
    lines = ["## What + switches on", ""]
    for contender in TITLES:
        words = dict.fromkeys(
            word for row in rows if row.entry.contender == contender for word in row.switches
        )
        if page.kind == "cpu" and contender in PEERS:
            words |= dict.fromkeys(f"{name}={value}" for name, value in SWITCHED_ENVIRONMENT.items())
        if words:
            lines.append(f"- {TITLES[contender]}: {', '.join(f'`{word}`' for word in words)}")
    if page.kind == "cpu":
        lines += [
            "",
            "The environment variables are those that this project sets for itself, in both columns.",
        ]
    return "\n".join(lines) if len(lines) > 2 else ""


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """For the terminal: each target in one line."""
    return [_target_line(target) for target in targets(rows)]


def _target_line(target: Target) -> str:
    values = [finding.value for finding in target.findings]
    met = len(values) - len(target.missed)
    missed = "; ".join(f"{finding.where} {finding.value:.2f}x" for finding in target.missed)
    return f"{target.claim}: {met} of {len(values)}{f'; missed: {missed}' if missed else ''}"


def _commit() -> str:
    """Of the checkout that was measured; `+` where files differ from it."""
    command = ("git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
