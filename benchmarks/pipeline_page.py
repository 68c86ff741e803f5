"""The page of the pipeline's costs, in Markdown."""

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.pipeline_checkout import ROOT
from benchmarks.pipeline_growth import Curve
from benchmarks.pipeline_loop import LoopCost
from benchmarks.pipeline_process import Spread
from benchmarks.pipeline_startup import TRAIN, Startup
from benchmarks.pipeline_tokenize import Tokenizing
from stages.measure.hardware import describe_device

LOOP_TARGET, CHECKPOINT_TARGET = 0.01, 0.02
TOKENIZE_TARGET = 0.9
STARTUP_TARGET = 3.0
"""Times what importing torch takes: 6 s where that takes 2."""
CONSTANT_MEMORY = 1.2
"""The peak with the largest corpus over that with the smallest."""
LINEAR, FLAT = 1.1, 0.15
"""Steepest slopes that count as linear and as no growth."""


@dataclass(frozen=True)
class Findings:
    """All that one run of the benchmark measured."""

    startups: Sequence[Startup]
    loops: Sequence[LoopCost]
    save_every_seconds: float
    """As params.yaml says."""
    tokenizing: Tokenizing
    model_curves: Sequence[Curve]
    long_run: Curve


@dataclass(frozen=True)
class Conditions:
    """What the figures hold for."""

    device: str
    kind: str
    threads: int
    commit: str
    date: str
    rounds: int
    load: tuple[float, float]
    """Of the machine before and after: processes that wanted a core, in the mean of a minute."""
    is_quick: bool

    @property
    def machine(self) -> str:
        return self.device if self.kind == "cuda" else f"{self.device}, {self.threads} threads"

    @property
    def name(self) -> str:
        """For files."""
        return re.sub(r"[^a-z0-9]+", "-", self.machine.lower()).strip("-")


def conditions(device: torch.device, rounds: int, load_before: float, *, is_quick: bool) -> Conditions:
    facts = describe_device(device)
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return Conditions(
        device=facts.name,
        kind=facts.kind,
        threads=facts.threads,
        commit=commit or "unknown",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        rounds=rounds,
        load=(load_before, os.getloadavg()[0]),
        is_quick=is_quick,
    )


@dataclass(frozen=True)
class Standing:
    """One target and what was found."""

    claim: str
    found: str
    is_met: bool


def standings(findings: Findings) -> list[Standing]:
    share = Spread.of([loop.outside_share for loop in findings.loops])
    saving = Spread.of([loop.checkpoint_share(findings.save_every_seconds) for loop in findings.loops])
    tokenizing = findings.tokenizing
    (train,) = (startup for startup in findings.startups if startup.what == TRAIN)
    few, many = tokenizing.stage_peak_bytes
    return [
        Standing(
            "the loop around the step costs under 1 % of it", share.text("{:.2%}"), share.median < LOOP_TARGET
        ),
        Standing(
            f"checkpointing every {findings.save_every_seconds:.0f} s, as params.yaml has it, under 2 %",
            saving.text("{:.2%}"),
            saving.median < CHECKPOINT_TARGET,
        ),
        Standing(
            "tokenize at or above 0.9x a bare encode loop",
            f"{tokenizing.ratio.text('{:.2f}x')}",
            tokenizing.ratio.median >= TOKENIZE_TARGET,
        ),
        Standing(
            "tokenize in constant memory",
            f"peak {few / 2**20:.0f} MiB with {tokenizing.megabytes[0]:.1f} MB of text, "
            f"{many / 2**20:.0f} MiB with {tokenizing.megabytes[1]:.1f} MB",
            many <= CONSTANT_MEMORY * few,
        ),
        Standing(
            "start-up to the end of the first step within 3 times torch's import (6 s where that takes 2)",
            f"{train.of_torch.text('{:.1f}x')}, {train.seconds.text('{:.1f} s')}",
            train.of_torch.median < STARTUP_TARGET,
        ),
        *(_growth(curve, "text") for curve in tokenizing.curves),
        *(_growth(curve, "parameters") for curve in findings.model_curves),
        _growth(findings.long_run, "steps done"),
    ]


def _growth(curve: Curve, by: str) -> Standing:
    slope = curve.slope()
    allowed = FLAT if curve.is_flat else LINEAR
    claim = "constant" if curve.is_flat else "linear or less"
    return Standing(
        f"{curve.name}: {claim} in {by} (exponent at most {allowed})",
        f"{slope:.2f}, at the end {curve.last_slope():.2f}",
        slope <= allowed,
    )


def write_page(path: Path, findings: Findings, page: Conditions, figure: str) -> None:
    parts = [
        _head(page, figure),
        _standing(findings),
        _startups(findings.startups),
        _loop(findings),
        _tokenize(findings.tokenizing),
        _growth_table(
            "As the corpus grows", "bytes of text, evaluate by validation tokens", findings.tokenizing.curves
        ),
        _growth_table("As the model grows", "parameters", findings.model_curves),
        _growth_table("As the training goes on", "steps done", [findings.long_run]),
        _READING,
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _head(page: Conditions, figure: str) -> str:
    quick = " `--quick`: these figures are a smoke test." if page.is_quick else ""
    return f"""# What the pipeline costs beside the training, on {page.machine}

Made by `python -m benchmarks.pipeline` on {page.date} at commit {page.commit}; {page.machine};
Python {platform.python_version()}, torch {torch.__version__}; rounds in turns: {page.rounds}; medians [lowest
to highest]; load of the machine {page.load[0]:.1f} before, {page.load[1]:.1f} after.{quick}

![growth]({figure})"""


def _standing(findings: Findings) -> str:
    lines = ["## Where it must stand", "", "| target | found | |", "| --- | --- | --- |"]
    for standing in standings(findings):
        lines.append(
            f"| {standing.claim} | {standing.found} | {'met' if standing.is_met else '**missed**'} |"
        )
    return "\n".join(lines)


def _startups(startups: Sequence[Startup]) -> str:
    lines = [
        "## Start-up",
        "",
        "Seconds from the start of the process; of CPU until then, all threads; and the first over what",
        "`import torch` took in the same round.",
        "",
        "| what | seconds | CPU seconds | of torch's import |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {startup.what} | {startup.seconds.text()} | {startup.cpu_seconds.text()} "
        f"| {startup.of_torch.text('{:.2f}x')} |"
        for startup in startups
    ]
    return "\n".join(lines)


def _loop(findings: Findings) -> str:
    loops = findings.loops
    lines = [
        "## Around the step",
        "",
        f"Variant baseline of params.yaml, {loops[0].steps} steps a run, tracked as always; a step takes "
        f"{Spread.of([1000 * loop.step_seconds for loop in loops]).text('{:.0f}')} ms.",
        "",
        "| part | µs a step | share |",
        "| --- | ---: | ---: |",
    ]
    for part in loops[0].outside:
        if part == "checkpoint":
            continue
        micros = Spread.of([1e6 * loop.outside[part] / loop.steps for loop in loops])
        share = Spread.of([loop.outside[part] / loop.seconds for loop in loops])
        lines.append(f"| {part} | {micros.text('{:.0f}')} | {share.text('{:.3%}')} |")
    share = Spread.of([loop.outside_share for loop in loops])
    lines += [
        f"| **all but checkpoints** | | **{share.text('{:.2%}')}** |",
        "",
        "| a checkpoint | ms |",
        "| --- | ---: |",
    ]
    for what, values in {
        "the training waits": [loop.saving_seconds for loop in loops],
        "written beside the training": [loop.writing_seconds for loop in loops],
        "the steps beside the writing take longer by": [loop.slowdown_seconds for loop in loops],
    }.items():
        lines.append(f"| {what} | {Spread.of([1000 * value for value in values]).text('{:.0f}')} |")
    sender = Spread.of([loop.sender_cpu_seconds for loop in loops])
    lines += [
        "",
        f"MLflow's sender, a process at the lowest priority, took {sender.text('{:.1f}')} s of CPU a run, "
        "most of it to import mlflow.",
    ]
    return "\n".join(lines)


def _tokenize(found: Tokenizing) -> str:
    rows = (
        ("the stage", found.stage, found.stage_peak_bytes),
        ("bare encode loop", found.bare, found.bare_peak_bytes),
    )
    lines = [
        "## Tokenize and evaluate",
        "",
        f"MB/s of each further MB between {found.megabytes[0]:.1f} and {found.megabytes[1]:.1f} MB of text; "
        "peak memory of all its processes.",
        "",
        "| | MB/s | peak MiB, smallest | peak MiB, largest |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {name} | {speed.text()} | {few / 2**20:.0f} | {many / 2**20:.0f} |"
        for name, speed, (few, many) in rows
    ]
    lines += [
        "",
        f"Evaluate: {found.evaluated_tokens_per_second.text('{:,.0f}')} tokens/s in fp32, over validation "
        "splits of all these sizes.",
    ]
    return "\n".join(lines)


def _growth_table(title: str, by: str, curves: Sequence[Curve]) -> str:
    lines = [
        f"## {title}",
        "",
        f"| cost | by {by}: lowest of the runs | exponent | at the end |",
        "| --- | --- | ---: | ---: |",
    ]
    for curve in curves:
        points = ", ".join(f"{_count(size)}: {_cost(cost)}" for size, cost in curve.lowest())
        lines.append(
            f"| {curve.name}, {curve.unit} | {points} | {curve.slope():.2f} | {curve.last_slope():.2f} |"
        )
    return "\n".join(lines)


def _count(value: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def _cost(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_READING = """## How to read it

- *Around the step*: one run has a clock on `train_step` and on what is called between two steps; what is
  neither is *the rest*. No second run without logging is compared with it: two runs of the same work differ
  by more than 1 %. On a GPU every clock waits for the device, so the share is what it would be if nothing
  overlapped.
- *A checkpoint*: what the training waits (copy of the state, the record of the run) and what the steps
  beside the writing take longer, over the interval of params.yaml. The interval is the user's: half of it,
  twice the share.
- *Tokenize*: the bare loop reads the same `.jsonl` and calls `tokenizers.Tokenizer.encode_batch` on 1,000
  documents at a time (`benchmarks/pipeline_bare_encode.py`); it hashes nothing and knows no splits. Speeds
  are of each further MB, so that neither start-up nor learning the merges is in them.
- *Exponent* p: cost ~ size^p by least squares over all sizes; *at the end*: between the two largest, where
  what does not grow weighs least. 1 is linear, 0 is constant."""
