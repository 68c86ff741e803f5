"""What a training has to show beside its state: collected on the way, kept with every checkpoint, published
at the end.

Results are the same bytes in every run of the same params on one machine, however often it was killed.
Measurements say what this run took and are files of their own.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ruamel.yaml import YAML

from stages.measure.compilation import CompileWatch
from stages.measure.flops import model_flops_per_token
from stages.measure.hardware import MatmulCeiling
from stages.measure.peak_memory import PeakMemory, peak_rss_bytes
from stages.measure.throughput import Interval, StepTimer
from stages.outs import publish_folder, write_out
from stages.params import Params
from stages.tracking import outs_md5_tags
from stages.training.checkpoint import MODEL, OPTIMIZER, RNG, STATE
from stages.training.checkpoint_store import CheckpointStore
from stages.training.loop import CurveRow, Measurements


@dataclass
class TrainRecord:
    """A run up to a checkpoint, over all its starts."""

    micro_batch_size: int
    """What it trains with: the params', or less where memory ran out."""
    halved: list[dict[str, int]] = field(default_factory=list)
    """{"after_step", "micro_batch_size"} of each time that memory ran out."""
    starts: int = 0
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """{"after_step", "ranks", "parallelism"} of the first start and of each that differs from the last."""
    rows: list[CurveRow] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    peak: PeakMemory | None = None
    totals: dict[str, float] = field(default_factory=dict)
    """Sums over the starts before this one: compiling, saving."""
    published: dict[str, str] | None = None
    """Text of each file to publish beside the checkpoint, once the training is complete."""

    def start(self, after_step: int, ranks: int, parallelism: str) -> None:
        """One more start, from a checkpoint of this step."""
        self.starts += 1
        now = {"ranks": ranks, "parallelism": parallelism}
        if not self.ranks or self.ranks[-1] | now != self.ranks[-1]:
            self.ranks.append({"after_step": after_step} | now)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; floats survive exactly."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        return cls(
            **dict(saved)
            | {
                "rows": [CurveRow(**row) for row in saved["rows"]],
                "intervals": [Interval(**interval) for interval in saved["intervals"]],
                "peak": None if saved["peak"] is None else PeakMemory(**saved["peak"]),
            }
        )

    def measurements(self, compilation: CompileWatch) -> Measurements:
        """Measurements that go on where this record is."""
        return Measurements(StepTimer(before=self.intervals), compilation, self.peak)

    def at_checkpoint(self, measurements: Measurements, store: CheckpointStore) -> "TrainRecord":
        """The record to keep now; `self` is that of the last restart."""
        return TrainRecord(
            micro_batch_size=self.micro_batch_size,
            halved=self.halved,
            starts=self.starts,
            ranks=self.ranks,
            rows=list(self.rows),
            intervals=list(measurements.timer.intervals),
            peak=measurements.peak,
            totals=self._totals(measurements.compilation, store),
        )

    def _totals(self, compilation: CompileWatch, store: CheckpointStore) -> dict[str, float]:
        now = {
            "compile_seconds": compilation.compile_seconds,
            "compilations": compilation.compilations,
            "recompiles": compilation.recompiles,
            "checkpoints": store.saves,
            "checkpoint_training_seconds": store.training_seconds,
            "checkpoint_writing_seconds": store.writing_seconds,
        }
        return {key: self.totals.get(key, 0) + value for key, value in now.items()}

    def figures(
        self, params: Params, measurements: Measurements, store: CheckpointStore, ceiling: MatmulCeiling
    ) -> dict[str, Any]:
        """The numbers of this run on this machine."""
        throughput, peak = measurements.timer.summary(), measurements.peak
        assert peak is not None, "a run has at least one step, and one of them is measured"
        flops = model_flops_per_token(
            params.model, params.tokenizer.vocab_size, params.training.sequence_length
        )
        ranks = params.training.ranks
        peak_flops = ranks * ceiling.flops_per_second
        return {
            "tokens_per_second": throughput.tokens_per_second,
            "median_step_seconds": throughput.median_step_seconds,
            "steps_counted": throughput.steps_counted,
            "includes_disturbed": throughput.includes_disturbed,
            "wall_seconds": measurements.timer.elapsed_seconds,
            "starts": self.starts,
            **self._totals(measurements.compilation, store),
            "peak_memory_bytes": peak.bytes,
            "peak_memory_kind": peak.kind,
            "peak_reserved_bytes": peak.reserved_bytes,
            "peak_rss_bytes": peak_rss_bytes(),
            "mfu": throughput.tokens_per_second * flops / peak_flops,
            "model_flops_per_token": flops,
            "peak_flops_per_second": peak_flops,
            "peak_flops_source": f"{ranks} x {ceiling.source}" if ranks > 1 else ceiling.source,
        }


def texts_to_publish(
    training: Mapping[str, Any],
    measured: Mapping[str, Any],
    rows: Sequence[CurveRow],
    timer: StepTimer,
) -> dict[str, str]:
    """The text outs of a complete run, by the keys that `publish` knows."""
    columns = ("step", "seconds", "tokens_per_second")
    timed = [dict(zip(columns, values, strict=True)) for values in timer.rows()]
    return {
        "training": _json(training),
        "curve": _csv([asdict(row) for row in rows]),
        "measurements": _json(measured),
        "timeline": _csv(timed),
    }


def publish(variant: str, checkpoint: Path, texts: Mapping[str, str]) -> None:
    """Write the outs of a complete run; its checkpoint's files are linked and not copied.

    Raises:
        OSError: an out cannot be written; those written are whole.
    """
    state = {name: checkpoint / name for name in (MODEL, OPTIMIZER, RNG, STATE)}
    publish_folder(state | {"training.json": texts["training"]}, Path("models") / variant)
    write_out(Path(f"results/curves/{variant}.csv"), texts["curve"])
    write_out(_measurements_path(variant), texts["measurements"])
    write_out(Path(f"results/measurements/{variant}.csv"), texts["timeline"])


def is_forced(variant: str, texts: Mapping[str, str]) -> bool:
    """Whether this complete run is in dvc.lock, and nothing that DVC looks at has changed since.

    Then whoever runs the stage again wants a new training (`dvc repro --force`), not the outs of this one.
    It is known by its measurements: no two runs have the same.
    """
    stage = f"train@{variant}"
    md5 = hashlib.md5(texts["measurements"].encode(), usedforsecurity=False).hexdigest()
    is_committed = outs_md5_tags(stage).get(f"md5.{_measurements_path(variant)}") == md5
    return is_committed and locked_params(stage) == present_params(locked_params(stage))


def locked_params(stage: str, dvc_lock: Path = Path("dvc.lock")) -> dict[str, Any]:
    """The params of params.yaml that dvc.lock has for a stage, by their dotted names."""
    params = _yaml(dvc_lock)["stages"][stage].get("params", {})
    found: dict[str, Any] = params.get("params.yaml", {})
    return found


def present_params(names: Iterable[str], params_yaml: Path = Path("params.yaml")) -> dict[str, Any]:
    """What params.yaml says of these dotted names; None for what is not there."""
    present = {}
    for name in names:
        value: Any = _yaml(params_yaml)
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        present[name] = value
    return present


def _yaml(path: Path) -> dict[str, Any]:
    # DVC's reader: to YAML 1.2 a bare `off` is a word, to PyYAML's 1.1 it is false.
    found: dict[str, Any] = YAML(typ="safe").load(path.read_text())
    return found


def _measurements_path(variant: str) -> Path:
    return Path(f"results/measurements/{variant}.json")


def _json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"


def _csv(rows: list[dict[str, float]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
