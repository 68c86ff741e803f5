"""Reads what plan, train and evaluate wrote about one variant, and says what is wrong with a file."""

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from stages.report.bootstrap import DocumentLosses
from stages.report.memory_timeline import MemoryTimeline, read_memory_timeline


class InputError(ValueError):
    """A file of an earlier stage is missing or is not what that stage writes."""


@dataclass(frozen=True)
class VariantFiles:
    """Where one variant's results lie."""

    variant: str
    plan: Path
    training: Path
    curve: Path
    measurement: Path
    timeline: Path
    evaluation: Path
    documents: Path
    samples: Path


class _Record(BaseModel):
    """The keys that the comparison needs; a file may hold more."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    variant: str


class Plan(_Record):
    micro_batch_size: PositiveInt
    accumulation_steps: PositiveInt
    sequence_length: PositiveInt
    predicted_allocated_bytes: PositiveInt
    """What the measurement is predicted to be: on a GPU the peak and what its allocator adds."""
    device: Literal["cpu", "cuda"]
    """Whose kernels were planned for."""
    parameter_count: PositiveInt
    method: str


class Training(_Record):
    seed: int
    steps: PositiveInt
    tokens: PositiveInt
    skipped_steps: NonNegativeInt
    precision: str
    micro_batch_size: PositiveInt
    accumulation_steps: PositiveInt
    out_of_memory: list[dict[str, int]]
    """Each time that memory ran out: the step before, the micro-batch after."""


class Device(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    kind: Literal["cpu", "cuda"]
    name: str
    threads: PositiveInt | None = None
    """CPU threads that one operation may use."""


class Measurement(_Record):
    device: Device
    tokens_per_second: NonNegativeFloat
    wall_seconds: NonNegativeFloat
    compile_seconds: NonNegativeFloat | None
    peak_memory_bytes: PositiveInt
    peak_memory_kind: str
    mfu: float | None
    peak_flops_source: str | None = None


class Evaluation(_Record):
    bits_per_byte: float
    perplexity: float
    documents: PositiveInt
    bytes: PositiveInt


@dataclass(frozen=True)
class Curve:
    """Training loss as it was logged; one entry per logged step."""

    steps: NDArray[np.float64]
    tokens: NDArray[np.float64]
    loss: NDArray[np.float64]
    """Nats per token."""
    seconds: NDArray[np.float64]
    """Wall-clock since training began."""


@dataclass(frozen=True)
class VariantResults:
    """Everything that was found out about one variant."""

    plan: Plan
    memory_timeline: MemoryTimeline
    """Predicted."""
    training: Training
    measurement: Measurement
    evaluation: Evaluation
    losses: DocumentLosses
    curve: Curve
    samples: str
    """Markdown with the model's continuations; empty where none were asked for."""


_R = TypeVar("_R", bound=_Record)


def read_variant(files: VariantFiles) -> VariantResults:
    """Read and check all files of one variant.

    Raises:
        InputError: names the file, what is wrong with it and the `dvc repro` that writes it.
    """
    name = files.variant
    plan = _read_record(files.plan, Plan, f"plan@{name}", name)
    training = _read_record(files.training, Training, f"train@{name}", name)
    measurement = _read_record(files.measurement, Measurement, f"train@{name}", name)
    evaluation = _read_record(files.evaluation, Evaluation, f"evaluate@{name}", name)
    losses = _read_documents(files.documents, evaluation, files.evaluation)
    curve = _read_curve(files.curve, files.timeline, f"train@{name}")
    memory_timeline = _read_memory_timeline(files.plan.with_suffix(".timeline.csv"), f"plan@{name}")
    samples = _read_text(files.samples, f"evaluate@{name}") if files.samples.exists() else ""
    return VariantResults(plan, memory_timeline, training, measurement, evaluation, losses, curve, samples)


def _read_memory_timeline(path: Path, target: str) -> MemoryTimeline:
    try:
        return read_memory_timeline(_read_text(path, target))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise _malformed(path, str(error), target) from None


def _read_text(path: Path, target: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; run `dvc repro {target}`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _malformed(path, f"cannot be read ({error})", target) from None


def _read_record(path: Path, kind: type[_R], target: str, variant: str) -> _R:
    text = _read_text(path, target)
    try:
        record = kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        found = "" if first["type"] in ("missing", "json_invalid") else f", found {first['input']!r}"
        what = f"{key}: {first['msg']}{found}" if key else f"{first['msg']}"
        raise _malformed(path, what, target) from None
    if record.variant != variant:
        raise _malformed(path, f"it is about the variant {record.variant!r}, not {variant!r}", target)
    return record


def _read_columns(path: Path, names: tuple[str, ...], target: str) -> list[list[str]]:
    """The named columns of a CSV file with a header, one list each, at least one row long."""
    text = _read_text(path, target)
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next(reader, [])
    absent = [name for name in names if name not in header]
    if absent:
        raise _malformed(path, f"its header {','.join(header)!r} has no {absent[0]!r}", target)
    places = [header.index(name) for name in names]
    rows = [row for row in reader if row]
    if not rows:
        raise _malformed(path, "it holds no rows", target)
    for row in rows:
        if len(row) != len(header):
            raise _malformed(path, f"a row of {len(row)} cells under {len(header)} names", target)
    return [[row[place] for row in rows] for place in places]


def _numbers(
    path: Path, column: str, cells: list[str], target: str, kind: Callable[[str], float] = float
) -> NDArray[np.float64]:
    numbers = np.empty(len(cells))
    for place, cell in enumerate(cells):
        try:
            numbers[place] = kind(cell)
        except ValueError:
            raise _malformed(path, f"line {place + 2}: {column} is {cell!r}, not a number", target) from None
    return numbers


def _read_documents(path: Path, evaluation: Evaluation, evaluation_path: Path) -> DocumentLosses:
    target = f"evaluate@{evaluation.variant}"
    ids, bytes_cells, nats_cells = _read_columns(path, ("document", "bytes", "nats"), target)
    losses = DocumentLosses(
        evaluation.variant,
        tuple(ids),
        _numbers(path, "bytes", bytes_cells, target, int).astype(np.int64),
        _numbers(path, "nats", nats_cells, target),
    )
    if not np.isfinite(losses.nats).all():
        raise InputError(
            f"{path}: a document's loss is not a finite number, so the training of "
            f"{evaluation.variant} diverged; lower training.learning_rate or change the variant's precision"
        )
    if not math.isclose(losses.bits_per_byte, evaluation.bits_per_byte, rel_tol=1e-4):
        raise InputError(
            f"{path} adds up to {losses.bits_per_byte:.5f} bits per byte and {evaluation_path} says "
            f"{evaluation.bits_per_byte:.5f}, so they are of different runs; "
            f"run `dvc repro --force --single-item {target}`"
        )
    return losses


def _read_curve(curve_path: Path, timeline_path: Path, target: str) -> Curve:
    curve = dict(
        zip(
            ("step", "tokens", "loss"),
            _read_columns(curve_path, ("step", "tokens", "loss"), target),
            strict=True,
        )
    )
    steps, tokens, loss = (_numbers(curve_path, name, cells, target) for name, cells in curve.items())
    step_cells, second_cells = _read_columns(timeline_path, ("step", "seconds"), target)
    timeline_steps = _numbers(timeline_path, "step", step_cells, target)
    seconds = _numbers(timeline_path, "seconds", second_cells, target)
    if (np.diff(steps) <= 0).any() or (np.diff(timeline_steps) <= 0).any():
        wrong = curve_path if (np.diff(steps) <= 0).any() else timeline_path
        raise _malformed(wrong, "its steps do not increase from row to row", target)
    if timeline_steps[-1] < steps[-1]:
        what = f"it ends at step {timeline_steps[-1]:.0f} and {curve_path} at step {steps[-1]:.0f}"
        raise _malformed(timeline_path, what, target)
    # Training begins with step 0 at 0 seconds; between two rows the time runs evenly.
    return Curve(steps, tokens, loss, np.interp(steps, np.r_[0, timeline_steps], np.r_[0, seconds]))


def _malformed(path: Path, what: str, target: str) -> InputError:
    return InputError(f"{path}: {what}; run `dvc repro --force --single-item {target}` to write it again")
