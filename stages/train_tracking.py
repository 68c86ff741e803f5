"""What a training tells MLflow: its params, tags, dataset and curves."""

import json
from pathlib import Path
from typing import Any

from stages.container_image import container_image
from stages.params import Params, flatten
from stages.report.style import LIGHT
from stages.tracking import RunTracker, TokensDataset, provenance_tags, work_root
from stages.train_run import TrainRun
from stages.training.loop import CurveRow, Measurements


def run_tracker(
    run: TrainRun, device_facts: dict[str, Any], tokens_meta: Path, *, resumed: bool
) -> RunTracker:
    """A tracker of this variant's run; `resumed` where it goes on from a checkpoint."""
    image = container_image()
    tags = {
        "mlflow.runColor": LIGHT.colour(list(run.params.variants).index(run.variant)),
        "variant": run.variant,
        "fingerprint": run.fingerprint,
        "device": device_facts["name"],
        "device.kind": device_facts["kind"],
    }
    return RunTracker(
        work_root(),
        run.variant,
        run.fingerprint,
        run.params.tracking.experiment,
        _flat_params(run.params, run.variant),
        provenance_tags() | tags | (image.tags() if image else {}),
        _dataset(tokens_meta),
        resumed=resumed,
    )


def track(tracker: RunTracker, row: CurveRow, measurements: Measurements) -> None:
    """One row of the curve, with the speed up to it."""
    tracker.log(
        row.step,
        {
            "loss": row.loss,
            "learning_rate": row.learning_rate,
            "grad_norm": row.grad_norm,
            "tokens": row.tokens,
            "tokens_per_second": measurements.timer.intervals[-1].tokens_per_second,
            "seconds": measurements.timer.elapsed_seconds,
        },
    )


def _flat_params(params: Params, variant: str) -> dict[str, object]:
    """What this run was made with; its own techniques as `variant.…`, the other variants left out."""
    shared = params.model_dump(exclude={"variants", "tracking"})
    techniques = params.variants[variant].model_dump()
    techniques["accumulation_steps"] = params.accumulation_steps(variant)
    return flatten(shared | {"variant": techniques})


def _dataset(tokens_meta: Path) -> TokensDataset:
    meta = json.loads(tokens_meta.read_text())
    corpus, splits = meta["corpus"], meta["splits"]
    counts = {
        f"{split}_{key}": splits[split][key] for split in splits for key in ("documents", "tokens", "bytes")
    }
    return TokensDataset(
        name=corpus["source"],
        sha256=splits["train"]["text_sha256"],
        source=json.dumps(corpus, sort_keys=True),
        profile=counts,
    )
