"""The end of a training: its outs are kept, published and said."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.measure.units import readable_bytes
from stages.train_results import TrainRecord, publish
from stages.train_run import TrainRun, say
from stages.train_tracking import run_tracker
from stages.training.loop import Measurements
from stages.training.state import TrainState

# Single numbers about the whole run that MLflow shows beside the curves.
SUMMARY = ("peak_memory_bytes", "compile_seconds", "recompiles", "mfu", "wall_seconds", "starts")


def keep_and_publish(
    run: TrainRun, state: TrainState, record: TrainRecord, measurements: Measurements, texts: dict[str, str]
) -> None:
    """First into the work folder: who is killed from here on finds all that is to be published there."""
    store = run.store
    complete = replace(record.at_checkpoint(measurements, store), published=texts)
    try:
        checkpoint = store.save_now(state, complete.to_dict(), consolidated=True)
        if run.ranks.is_first:
            publish(run.variant, checkpoint, texts)
            store.remove(store.checkpoints()[:-1])
    except OSError as error:
        raise OSError(
            f"{error}; mend that and run `dvc repro`: it goes on from the last checkpoint"
        ) from None


def publish_again(run: TrainRun, texts: dict[str, str], tokens_meta: Path) -> None:
    """A run that was complete and died before DVC had its outs."""
    measured = json.loads(texts["measurements"])
    with run_tracker(run, measured["device"], tokens_meta, resumed=True) as tracker:
        tracker.log_summary({key: measured[key] for key in SUMMARY})
        publish(run.variant, run.store.checkpoints()[-1], texts)
    print(f"{run.variant}: was complete; its outs are published from {run.store.folder}")


def training_facts(run: TrainRun, state: TrainState, record: TrainRecord) -> dict[str, Any]:
    final_loss = record.rows[-1].loss
    return {
        "variant": run.variant,
        "fingerprint": run.fingerprint,
        "seed": run.params.seed,
        "steps": state.step,
        "tokens": state.tokens,
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "final_loss": final_loss if math.isfinite(final_loss) else None,
        "skipped_steps": int(state.skipped_steps),
        "precision": run.techniques.precision,
        "micro_batch_size": run.techniques.micro_batch_size,
        "accumulation_steps": run.params.accumulation_steps(run.variant),
        "ranks": record.ranks,
        "out_of_memory": record.halved,
    }


def print_end(run: TrainRun, state: TrainState, record: TrainRecord, figures: dict[str, Any]) -> None:
    if figures["recompiles"]:
        say(
            f"{run.variant}: torch.compile compiled {figures['recompiles']:.0f} times more after the first "
            "step; a shape or a type changed, and the speed includes it"
        )
    print(
        f"{run.variant}: {state.tokens:,} tokens, loss {record.rows[-1].loss:.4f}, "
        f"{figures['tokens_per_second']:,.0f} tokens/s, peak {readable_bytes(figures['peak_memory_bytes'])}"
    )
