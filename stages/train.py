"""The train stage: `python -m stages.train VARIANT`.

Reads the tokens, trains the variant, and writes its checkpoint and curve (results: the same in every run
of the same params) and its measurements (of this run on this machine).
"""

import argparse
import csv
import io
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError

from stages.data.sequences import PackedSequences, PaddedSequences, SequencesError, make_sequences
from stages.data.token_files import TokenFile, TokenFileError
from stages.fingerprint import train_fingerprint
from stages.measure.compilation import CompileWatch
from stages.measure.flops import model_flops_per_token
from stages.measure.hardware import (
    HardwareError,
    MatmulCeiling,
    describe_device,
    measure_matmul_flops_per_second,
    select_device,
)
from stages.measure.host_allocator import keep_freed_memory
from stages.measure.peak_memory import peak_rss_bytes
from stages.measure.throughput import StepTimer
from stages.model.attention import attention_kernel
from stages.outs import out_folder, write_out
from stages.params import Params, ParamsError, flatten, load_params
from stages.progress import TrainingProgress
from stages.report.style import LIGHT
from stages.tracking import RunTracker, TokensDataset, project_root, provenance_tags, work_root
from stages.training.checkpoint import save_checkpoint
from stages.training.compilation import apply_compile, use_compile_cache
from stages.training.device_rules import DeviceRuleError, check_device_rules
from stages.training.loop import CurveRow, Measurements, training_rows
from stages.training.precision import PrecisionError, set_float32_matmul
from stages.training.recompute import apply_recompute
from stages.training.state import TrainState, initial_state

TOKENS = Path("data/tokens")
TOKENS_META = TOKENS / "meta.json"


class DivergedError(RuntimeError):
    """The loss is no number any more."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.train", description=__doc__)
    parser.add_argument("variant", help="a key of `variants` in params.yaml")
    variant = parser.parse_args(arguments).variant
    try:
        params = load_params()
        params.require_variant(variant)
        train(params, variant)
    except KeyboardInterrupt:
        print(f"train {variant}: interrupted; none of its outs were written", file=sys.stderr)
        return 130
    except OutOfMemoryError as error:
        print(
            f"train {variant}: {str(error).split('. ')[0]}; lower variants.{variant}.micro_batch_size, or "
            "use loss: chunked or recompute (`python -m stages.plan` predicts the peak)",
            file=sys.stderr,
        )
        return 1
    except (
        ParamsError,
        HardwareError,
        PrecisionError,
        DeviceRuleError,
        TokenFileError,
        SequencesError,
        DivergedError,
        OSError,
    ) as error:
        print(f"train {variant}: {error}", file=sys.stderr)
        return 1
    return 0


def train(params: Params, variant: str) -> None:
    """Train one variant from the first step to the last and publish its outs."""
    techniques = params.variants[variant]
    device = select_device(params.hardware.device)
    if device.type == "cpu":
        keep_freed_memory()
    check_device_rules(params.model, techniques, device)
    use_compile_cache(project_root() / params.hardware.compile_cache)
    matmul_setting = set_float32_matmul(techniques.precision, device)
    ceiling = measure_matmul_flops_per_second(device, techniques.precision)
    sequences = _train_sequences(params)
    state, policy = initial_state(params, variant, device)
    apply_recompute(state.model, techniques)
    apply_compile(state.model, techniques)

    device_facts = asdict(describe_device(device)) | {
        "float32_matmul_precision": matmul_setting,
        "attention_kernel": attention_kernel(device, policy.autocast_dtype or policy.weights_dtype),
    }
    fingerprint = train_fingerprint(params, variant, device.type, TOKENS_META)
    rows: list[CurveRow] = []
    with (
        _tracker(params, variant, fingerprint, device_facts) as tracker,
        TrainingProgress(variant, params.training.num_steps) as progress,
        CompileWatch(enabled=techniques.compile != "off") as compilation,
    ):
        measurements = Measurements(StepTimer(), compilation)
        for row in training_rows(state, sequences, params, variant, policy, measurements):
            rows.append(row)
            if not math.isfinite(row.loss):
                raise DivergedError(
                    f"the loss is {row.loss} at step {row.step}: the training diverged; lower "
                    f"training.learning_rate or change variants.{variant}.precision"
                )
            tokens_per_second = measurements.timer.rows()[-1][2]
            peak_bytes = measurements.peak.bytes if measurements.peak else None
            tracker.log(
                row.step,
                {
                    "loss": row.loss,
                    "learning_rate": row.learning_rate,
                    "grad_norm": row.grad_norm,
                    "tokens": row.tokens,
                    "tokens_per_second": tokens_per_second,
                    "seconds": measurements.timer.elapsed_seconds,
                },
            )
            progress.show(row, tokens_per_second, peak_bytes)
        figures = _figures(params, variant, state, measurements, ceiling)
        tracker.log_summary(
            {
                key: figures[key]
                for key in ("peak_memory_bytes", "compile_seconds", "recompiles", "mfu", "wall_seconds")
            }
        )
        _publish_results(params, variant, fingerprint, state, rows)
        _publish_measurements(variant, {"variant": variant, "device": device_facts} | figures, measurements)
    if figures["recompiles"]:
        print(
            f"{variant}: torch.compile compiled {figures['recompiles']} times more after the first step; a "
            "shape or a type changed, and the speed includes it",
            file=sys.stderr,
        )
    print(
        f"{variant}: {state.tokens:,} tokens, loss {rows[-1].loss:.4f}, "
        f"{figures['tokens_per_second']:,.0f} tokens/s, peak {figures['peak_memory_bytes'] / 2**20:,.0f} MiB"
    )


def _train_sequences(params: Params) -> PackedSequences | PaddedSequences:
    token_file = TokenFile.open(TOKENS / "train.safetensors")
    if token_file.vocab_size != params.tokenizer.vocab_size:
        raise TokenFileError(
            f"{token_file.path} was made for tokenizer.vocab_size {token_file.vocab_size}, params.yaml says "
            f"{params.tokenizer.vocab_size}; run `dvc repro tokenize`"
        )
    if not TOKENS_META.exists():
        raise TokenFileError(f"{TOKENS_META}: no such file; run `dvc repro tokenize`")
    return make_sequences(token_file, params.training.sequences, params.training.sequence_length)


def _tracker(params: Params, variant: str, fingerprint: str, device_facts: dict[str, Any]) -> RunTracker:
    tags = {
        "mlflow.runColor": LIGHT.colour(list(params.variants).index(variant)),
        "variant": variant,
        "fingerprint": fingerprint,
        "device": device_facts["name"],
        "device.kind": device_facts["kind"],
    }
    return RunTracker(
        work_root(),
        variant,
        fingerprint,
        params.tracking.experiment,
        _flat_params(params, variant),
        provenance_tags() | tags,
        _dataset(),
    )


def _publish_results(
    params: Params, variant: str, fingerprint: str, state: TrainState, rows: list[CurveRow]
) -> None:
    """The checkpoint and the curve: the same bytes in every run of the same params on one machine."""
    training = {
        "variant": variant,
        "fingerprint": fingerprint,
        "seed": params.seed,
        "steps": state.step,
        "tokens": state.tokens,
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "final_loss": rows[-1].loss,
        "skipped_steps": int(state.skipped_steps),
        "precision": params.variants[variant].precision,
    }
    with out_folder(Path("models") / variant) as folder:
        save_checkpoint(state, folder)
        (folder / "training.json").write_text(_json(training))
    write_out(Path(f"results/curves/{variant}.csv"), _csv([asdict(row) for row in rows]))


def _publish_measurements(variant: str, summary: dict[str, Any], measurements: Measurements) -> None:
    """What this run took on this machine, in files of its own: they alone may differ."""
    write_out(Path(f"results/measurements/{variant}.json"), _json(summary))
    columns = ("step", "seconds", "tokens_per_second")
    timed = [dict(zip(columns, values, strict=True)) for values in measurements.timer.rows()]
    write_out(Path(f"results/measurements/{variant}.csv"), _csv(timed))


def _figures(
    params: Params, variant: str, state: TrainState, measurements: Measurements, ceiling: MatmulCeiling
) -> dict[str, Any]:
    """The numbers of this run on this machine."""
    throughput, peak = measurements.timer.summary(), measurements.peak
    assert peak is not None, "a run has at least one step, and one of them is measured"
    flops = model_flops_per_token(params.model, params.tokenizer.vocab_size, params.training.sequence_length)
    return {
        "tokens_per_second": throughput.tokens_per_second,
        "median_step_seconds": throughput.median_step_seconds,
        "steps_counted": throughput.steps_counted,
        "includes_disturbed": throughput.includes_disturbed,
        "wall_seconds": measurements.timer.elapsed_seconds,
        "compile_seconds": measurements.compilation.compile_seconds,
        "compilations": measurements.compilation.compilations,
        "recompiles": measurements.compilation.recompiles,
        "peak_memory_bytes": peak.bytes,
        "peak_memory_kind": peak.kind,
        "peak_reserved_bytes": peak.reserved_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
        "mfu": throughput.tokens_per_second * flops / ceiling.flops_per_second,
        "model_flops_per_token": flops,
        "peak_flops_per_second": ceiling.flops_per_second,
        "peak_flops_source": ceiling.source,
    }


def _flat_params(params: Params, variant: str) -> dict[str, object]:
    """What this run was made with; its own techniques as `variant.…`, the other variants left out."""
    shared = params.model_dump(exclude={"variants", "tracking"})
    techniques = params.variants[variant].model_dump()
    techniques["accumulation_steps"] = params.accumulation_steps(variant)
    return flatten(shared | {"variant": techniques})


def _dataset() -> TokensDataset:
    meta = json.loads(TOKENS_META.read_text())
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


def _json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"


def _csv(rows: list[dict[str, float]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
