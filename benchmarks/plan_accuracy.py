"""The planner held against real steps on this CPU: `python -m benchmarks.plan_accuracy`.

Prints, and writes to benchmarks/results/plan_accuracy_cpu.md, predicted and measured peak memory of the
second step of small models under every technique that runs here. On a CPU every allocation can be counted, so
the error is the planner's alone: each step is measured as it runs, and again without oneDNN, which packs what
it multiplies into as much memory as suits the processor. `--eager-only` leaves out the compiled variants,
which need a C++ compiler, and writes nothing.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# As the train stage runs; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _COMPILED = tempfile.TemporaryDirectory(prefix="plan_accuracy_")  # goes when the process does
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _COMPILED.name

import numpy as np
import torch

from stages.data.sequences import MicroBatch
from stages.measure.host_allocator import keep_freed_memory
from stages.measure.peak_memory import live_cpu_blocks, measure_peak
from stages.memory import MemoryPrediction, predict
from stages.params import Params, check_params
from stages.training import blockwise_quantization
from stages.training.compilation import apply_compile
from stages.training.determinism import use_deterministic_kernels
from stages.training.precision import set_float32_matmul
from stages.training.recompute import apply_recompute
from stages.training.state import initial_state
from stages.training.step import train_step

RESULTS = Path(__file__).parent / "results" / "plan_accuracy_cpu.md"
VARIANT = "v"
SHAPES = {
    "small": {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2},
    "wide": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1},
    "deep": {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
}
CHUNKED = {"loss": "chunked", "loss_chunk_tokens": 64}
LEAN = {**CHUNKED, "recompute": "every_block"}


@dataclass(frozen=True)
class Configuration:
    """One row of the table."""

    shape: str
    techniques: dict[str, Any]
    vocab_size: int = 2048
    sequence_length: int = 64
    global_batch_size: int = 4
    sequences: str = "packed"
    tied: bool = False

    @property
    def params(self) -> Params:
        shape = SHAPES[self.shape]
        in_backward = self.techniques.get("optimizer_in_backward", False)
        return check_params(
            {
                "seed": 0,
                "corpus": {"source": "embedded"},
                "tokenizer": {"vocab_size": self.vocab_size},
                "model": shape
                | {
                    "intermediate_size": shape["hidden_size"] * 8 // 3 // 16 * 16,
                    "max_position_embeddings": self.sequence_length,
                    "tie_word_embeddings": self.tied,
                },
                "training": {
                    "sequences": self.sequences,
                    "sequence_length": self.sequence_length,
                    "global_batch_size": self.global_batch_size,
                    "token_budget": 10**7,
                    "learning_rate": 1e-3,
                    "max_grad_norm": None if in_backward else 1.0,
                },
                "variants": {VARIANT: {"micro_batch_size": self.global_batch_size} | self.techniques},
            }
        )


def eager_configurations() -> Iterator[Configuration]:
    for precision in ("fp32", "amp_bf16", "bf16"):
        for recompute in ("none", "every_block", "selective", {"every_n_blocks": 2}):
            for loss in ({"loss": "full"}, CHUNKED):
                yield Configuration("small", {"precision": precision, "recompute": recompute, **loss})
    for shape in ("wide", "deep"):
        for techniques in ({}, {"precision": "amp_bf16"}, {"precision": "amp_bf16", **LEAN}):
            yield Configuration(shape, techniques)
            yield Configuration(shape, techniques | {"micro_batch_size": 1})
    for techniques in ({}, {"precision": "amp_bf16", **LEAN}):
        yield Configuration("small", techniques, sequences="padded")
        yield Configuration("small", techniques, tied=True)
        yield Configuration("small", techniques, vocab_size=300, sequence_length=256)
        yield Configuration("small", techniques | {"micro_batch_size": 2})
        yield Configuration("small", techniques | {"optimizer": "adamw_8bit"})
        yield Configuration("small", techniques | {"optimizer": "muon"})
        yield Configuration("small", techniques | {"optimizer_in_backward": True})
        yield Configuration("small", techniques | {"optimizer_in_backward": True, "optimizer": "adamw_8bit"})
    yield Configuration("small", {"precision": "bf16", "optimizer": "adamw_8bit", **LEAN})
    yield Configuration("small", {"precision": "bf16", "optimizer_in_backward": True, **LEAN})
    # A CPU computes in float16, but very slowly.
    yield Configuration("tiny", {"precision": "amp_fp16"}, vocab_size=300, sequence_length=16)
    yield Configuration("tiny", {"precision": "amp_fp16", "micro_batch_size": 1}, 300, 16)


def compiled_configurations() -> Iterator[Configuration]:
    for techniques in (
        {},
        LEAN,
        {"precision": "amp_bf16"},
        {"precision": "amp_bf16", **LEAN},
        {"precision": "bf16", **CHUNKED},
        {"recompute": "selective"},
        {"recompute": {"budget": 0.5}},
        {"recompute": {"every_n_blocks": 2}, **CHUNKED},
        {"precision": "amp_bf16", "micro_batch_size": 2, "optimizer": "adamw_8bit"},
    ):
        yield Configuration("small", {"compile": "blocks", **techniques})
    yield Configuration("small", {"compile": "blocks"}, sequences="padded")
    yield Configuration("wide", {"compile": "blocks", "precision": "amp_bf16", **LEAN}, 300, 256)
    for techniques in ({}, {"precision": "amp_bf16", **CHUNKED}):
        yield Configuration("small", {"compile": "blocks", **techniques}, 300, 256)
    yield Configuration("small", {"compile": "model"})


def predicted(params: Params, device: str = "cpu") -> MemoryPrediction:
    vocab_size = params.tokenizer.vocab_size
    return predict(params.model, vocab_size, params.training, params.variants[VARIANT], device)  # type: ignore[arg-type]


def measured_peak(params: Params, device: torch.device) -> int:
    """Peak bytes of the second real step; what was alive before is taken off.

    Every row of a batch is one document. A batch with more of them attends in smaller pieces, and no
    tensor that is kept differs.
    """
    variant = params.variants[VARIANT]
    blockwise_quantization._table.cache_clear()
    blockwise_quantization._search_tables.cache_clear()
    if variant.compile != "off":
        torch._dynamo.reset()  # what was compiled before keeps the memory budget of that time
    gc.collect()
    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_cuda else sum(live_cpu_blocks().values())
    use_deterministic_kernels(device)
    set_float32_matmul(variant.precision, device)
    state, policy = initial_state(params, VARIANT, device)
    apply_recompute(state.model, variant)
    apply_compile(state.model, variant)
    batches = [_batch(params, seed, device) for seed in range(params.accumulation_steps(VARIANT))]

    def step() -> None:
        train_step(state, batches, variant, params.training, policy)

    step()
    return measure_peak(device, step).bytes - before


@contextmanager
def without_onednn() -> Iterator[None]:
    """Inside, products are those of the BLAS that PyTorch is linked with, which allocates nothing."""
    before = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before[0])


def _batch(params: Params, seed: int, device: torch.device) -> MicroBatch:
    rows, positions = params.variants[VARIANT].micro_batch_size, params.training.sequence_length
    generator = np.random.default_rng(seed)
    ids, targets = generator.integers(0, params.tokenizer.vocab_size, (2, rows, positions))
    starts = np.arange(0, rows * positions + 1, positions, dtype=np.int32)
    packed = params.training.sequences == "packed"
    return MicroBatch(
        torch.from_numpy(ids.copy()).to(device),
        torch.from_numpy(targets.copy()).to(device),
        torch.from_numpy(starts).to(device) if packed else None,
        rows * positions,
        rows * positions,
    )


@dataclass(frozen=True)
class Errors:
    """Of predictions, as shares of the measured peak."""

    as_it_runs: list[float] = field(default_factory=list)
    without_onednn: list[float] = field(default_factory=list)

    def summary(self) -> str:
        """Two sentences."""
        exact = sum(error == 0 for error in self.without_onednn)
        return (
            f"{len(self.as_it_runs)} configurations. As they run: {_spread(self.as_it_runs)}. "
            f"Without oneDNN: {exact} to the byte; {_spread(self.without_onednn)}."
        )


def _spread(errors: list[float]) -> str:
    within = sum(abs(error) <= 0.005 for error in errors)
    return (
        f"median error {statistics.median(map(abs, errors)):.4%}, {within} within 0.5%, "
        f"lowest {min(errors):+.4%}, highest {max(errors):+.4%}"
    )


def table(configurations: Iterator[Configuration]) -> tuple[list[str], Errors]:
    """Lines of Markdown, printed as they come, and the errors."""
    lines = [
        "| model | vocabulary | techniques | batch | predicted MiB | measured MiB | error | without oneDNN "
        "| fullest at |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    errors = Errors()
    print(*lines, sep="\n")
    for configuration in configurations:
        params = configuration.params
        prediction, measured = predicted(params), measured_peak(params, torch.device("cpu"))
        with without_onednn():
            unpacked = measured_peak(params, torch.device("cpu"))
        errors.as_it_runs.append(prediction.peak_bytes / measured - 1)
        errors.without_onednn.append(prediction.peak_bytes / unpacked - 1)
        rows, steps = params.variants[VARIANT].micro_batch_size, params.accumulation_steps(VARIANT)
        shape = configuration.shape + (", tied" if configuration.tied else "")
        lines.append(
            f"| {shape} | {configuration.vocab_size:,} | "
            f"{_techniques(configuration)} | {steps} x {rows} x {configuration.sequence_length}, "
            f"{configuration.sequences} | {prediction.peak_bytes / 2**20:.3f} | {measured / 2**20:.3f} | "
            f"{errors.as_it_runs[-1]:+.3%} | {errors.without_onednn[-1]:+.3%} | {prediction.moment} |"
        )
        print(lines[-1], flush=True)
    return lines, errors


def _techniques(configuration: Configuration) -> str:
    hidden = {"micro_batch_size", "loss_chunk_tokens"}
    named = {"precision": "fp32"} | configuration.techniques
    words = []
    for key, value in named.items():
        if key in hidden or value in ("none", "full"):
            continue
        words.append(key if value is True else str(value) if isinstance(value, str) else f"{value}")
    return ", ".join(words).replace("{", "").replace("}", "").replace("'", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--eager-only", action="store_true", help="leave out the compiled variants")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)  # tensors of this size gain nothing from a second one
    begun = time.perf_counter()
    eager, eager_errors = table(eager_configurations())
    print(eager_errors.summary(), "\n")
    text = [
        "# Predicted and measured peak memory on a CPU",
        "",
        f"Made by `python -m benchmarks.plan_accuracy` with torch {torch.__version__}. "
        "Batch: micro-batches x sequences x tokens.",
        "",
        "## Eager variants",
        "",
        *eager,
        "",
        eager_errors.summary(),
    ]
    if not options.eager_only:
        compiled, compiled_errors = table(compiled_configurations())
        print(compiled_errors.summary())
        text += ["", "## Compiled variants", "", *compiled, "", compiled_errors.summary()]
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"\n{time.perf_counter() - begun:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
