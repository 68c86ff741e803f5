"""Realistic results of four variants, written as the earlier stages write them."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from stages.compare import variant_files
from stages.params import load_params
from stages.report.memory_timeline import KINDS
from stages.report.rows import Comparison, build_comparison

# Memory in MiB, compilation in seconds; `worse` is the added loss in nats per byte.
_VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": {
        "params": {"precision": "fp32", "micro_batch_size": 16},
        "speed": 9_800.0, "peak": 612.0, "predicted": 604.0, "compile": 0.0, "worse": 0.0, "mfu": 0.31,
    },
    "amp_checkpointing": {
        "params": {"precision": "amp_bf16", "recompute": "every_block", "micro_batch_size": 16},
        "speed": 11_900.0, "peak": 371.0, "predicted": 383.0, "compile": 0.0, "worse": 0.0011, "mfu": 0.12,
    },
    "compiled_accumulated": {
        "params": {"precision": "fp32", "compile": "blocks", "micro_batch_size": 4},
        "speed": 13_400.0, "peak": 168.0, "predicted": 176.0, "compile": 21.0, "worse": 0.0001, "mfu": 0.42,
    },
    "frugal": {
        "params": {
            "precision": "amp_bf16", "recompute": "every_block", "compile": "blocks", "loss": "chunked",
            "loss_chunk_tokens": 512, "micro_batch_size": 4,
        },
        "speed": 14_700.0, "peak": 79.0, "predicted": 74.0, "compile": 34.0, "worse": 0.0012, "mfu": 0.15,
    },
}  # fmt: skip


def write_results(
    root: Path, *, steps: int = 245, log_every: int = 10, documents: int = 25, seed: int = 1337
) -> None:
    """Write params.yaml and the files of plan, train and evaluate for four variants into `root`."""
    tokens_per_step = 16 * 256
    params = {
        "seed": seed,
        "corpus": {"source": "embedded"},
        "tokenizer": {"vocab_size": 2048},
        "model": {
            "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6,
            "num_key_value_heads": 2, "intermediate_size": 512,
        },
        "training": {
            "sequence_length": 256, "global_batch_size": 16, "token_budget": steps * tokens_per_step,
            "learning_rate": 0.004, "warmup_steps": min(20, max(steps - 2, 0)),
        },
        "evaluation": {"bootstrap_samples": 2000},
        "variants": {name: variant["params"] for name, variant in _VARIANTS.items()},
    }  # fmt: skip
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    rng = np.random.default_rng(seed)
    logged = np.unique([1, *range(log_every, steps + 1, log_every), steps])
    batch_noise = rng.normal(0, 0.06, logged.size)
    document_bytes = rng.integers(8_000, 90_000, documents)
    document_nats_per_byte = rng.normal(1.06, 0.05, documents)
    for name, variant in _VARIANTS.items():
        _write_variant(
            root, name, variant, logged, batch_noise, document_bytes, document_nats_per_byte, rng, seed,
        )  # fmt: skip


def _write_variant(
    root: Path,
    name: str,
    variant: dict[str, Any],
    logged: np.ndarray,
    batch_noise: np.ndarray,
    document_bytes: np.ndarray,
    document_nats_per_byte: np.ndarray,
    rng: np.random.Generator,
    seed: int,
) -> None:
    tokens_per_step, steps = 16 * 256, int(logged[-1])
    micro_batch_size = variant["params"]["micro_batch_size"]
    predicted = int(variant["predicted"] * 2**20)
    write_json(
        root / f"results/plan/{name}.json",
        {
            "variant": name, "micro_batch_size": micro_batch_size,
            "accumulation_steps": 16 // micro_batch_size, "sequence_length": 256,
            "predicted_peak_memory_bytes": predicted, "predicted_allocated_bytes": predicted, "device": "cpu",
            "components": {"parameters": predicted // 8, "activations": predicted - predicted // 8},
            "parameter_count": 2_362_560, "model_flops_per_token": 1.5e7, "step_model_flops": 6.1e10,
            "method": "traced",
        },
    )  # fmt: skip
    write_csv(
        root / f"results/plan/{name}.timeline.csv",
        ["event", "phase", *KINDS],
        [
            [event, phase, predicted // 8, predicted // 8, predicted // 16 * (event // 6), *rest]
            for event, (phase, *rest) in enumerate(_step(predicted))
        ],
    )
    progress = logged / steps
    own_noise = rng.normal(0, 3.5 * variant["worse"], logged.size)
    loss = 3.62 + 4.0 * np.exp(-9 * progress) + 0.35 * (1 - progress) + batch_noise + own_noise
    write_csv(
        root / f"results/curves/{name}.csv",
        ["step", "tokens", "loss", "learning_rate", "grad_norm"],
        [
            [int(step), int(step) * tokens_per_step, f"{value:.6f}", "0.004", "0.8"]
            for step, value in zip(logged, loss, strict=True)
        ],
    )
    seconds = variant["compile"] + logged * tokens_per_step / variant["speed"]
    write_csv(
        root / f"results/measurements/{name}.csv",
        ["step", "seconds", "tokens_per_second"],
        [[int(s), f"{t:.3f}", f"{variant['speed']:.1f}"] for s, t in zip(logged, seconds, strict=True)],
    )
    write_json(
        root / f"models/{name}/training.json",
        {
            "variant": name, "fingerprint": "0123abcd", "seed": seed, "steps": steps,
            "tokens": steps * tokens_per_step, "final_loss": float(loss[-1]), "skipped_steps": 0,
            "precision": variant["params"]["precision"],
            "micro_batch_size": micro_batch_size, "accumulation_steps": 16 // micro_batch_size,
            "out_of_memory": [],
        },
    )  # fmt: skip
    write_json(
        root / f"results/measurements/{name}.json",
        {
            "variant": name, "device": {"kind": "cpu", "name": "AMD EPYC", "threads": 2},
            "tokens_per_second": variant["speed"], "median_step_seconds": tokens_per_step / variant["speed"],
            "wall_seconds": float(seconds[-1]), "compile_seconds": variant["compile"], "recompiles": 0,
            "peak_memory_bytes": int(variant["peak"] * 2**20),
            "peak_memory_kind": "cpu: live tensor bytes of one profiled step",
            "peak_reserved_bytes": None, "peak_rss_bytes": 1_400_000_000, "mfu": variant["mfu"],
            "peak_flops_per_second": 4.3e11,
            "peak_flops_source": "measured matrix products in this precision",
        },
    )  # fmt: skip
    nats = document_bytes * (
        document_nats_per_byte + variant["worse"] * rng.normal(1, 2.5, document_bytes.size)
    )
    tokens = document_bytes // 4
    write_documents(root, name, document_bytes, nats)
    write_json(
        root / f"results/evaluate/{name}.json",
        {
            "variant": name, "bits_per_byte": float(nats.sum() / np.log(2) / document_bytes.sum()),
            "perplexity": float(np.exp(nats.sum() / tokens.sum())),
            "loss_nats_per_token": float(nats.sum() / tokens.sum()), "tokens": int(tokens.sum()),
            "bytes": int(document_bytes.sum()), "documents": len(document_bytes),
        },
    )  # fmt: skip
    (root / f"results/evaluate/{name}.samples.md").write_text(
        f"# {name}: samples\n\n"
        "> **My fellow citizens,** the condition of the <b>Treasury</b> has been ![so](http://x.example/y) "
        "much improved that the Congress may now consider the reduction of the duties upon imports.\n\n"
        "> **In the war** with Mexico the Government of the United States has been compelled.\n"
    )


def _step(peak: int) -> list[tuple[str, int, int, int]]:
    """Phase, and activations, logits and temporaries, of a step of one block."""
    block = "block 1 of 1, "
    return [
        ("", 0, 0, 0), ("embedding, forward", peak // 16, 0, 0), (f"{block}forward", peak // 4, 0, 0),
        (f"{block}forward", peak // 2, 0, 0), ("head and loss, forward", peak // 2, peak // 8, 0),
        ("head and loss, backward", peak // 2, peak - peak // 8 * 2 - peak // 2, 0),
        (f"{block}recompute", peak // 4, 0, peak // 8), (f"{block}backward", peak // 4, 0, peak // 4),
        ("embedding, backward", 0, 0, 0), ("gradient clipping", 0, 0, 0), ("optimizer step", 0, 0, 0),
    ]  # fmt: skip


def write_documents(root: Path, variant: str, document_bytes: np.ndarray, nats: np.ndarray) -> None:
    write_csv(
        root / f"results/evaluate/{variant}.documents.csv",
        ["document", "tokens", "bytes", "nats"],
        [
            [place, int(size) // 4, int(size), repr(float(loss))]
            for place, (size, loss) in enumerate(zip(document_bytes, nats, strict=True))
        ],
    )


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))


def write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def edit_json(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def build() -> Comparison:
    """Read back what lies in the current folder."""
    params = load_params()
    return build_comparison(params, {variant: variant_files(variant) for variant in params.variants})
