"""Three sizes of model on 1, 8 and 64 GPUs, on paper: `python -m benchmarks.scale_on_paper`.

Prints, and writes to benchmarks/results/scale_on_paper.md, what the planner says of memory, speed, days, cost
and storage, and what breaks first. Nothing was measured: memory is predicted by tracing the step of one rank,
speed is a forecast (stages/measure/forecast.py), and what is assumed beside is below and in the page. Needs
no GPU; takes some minutes of CPU.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from stages.measure.flops import parameter_count
from stages.measure.forecast import Forecast, forecast
from stages.measure.targets import TARGETS, Target
from stages.measure.units import readable_bytes
from stages.memory.candidates import candidates_of
from stages.memory.fit import Predictions, largest_micro_batch
from stages.memory.machine import machine_of
from stages.memory.prediction import MemoryPrediction
from stages.params import Params, VariantParams, check_params

RESULTS = Path(__file__).parent / "results" / "scale_on_paper.md"

PRICES = {"rtx_4090": 0.40, "h100_80gb": 2.50}
"""USD for an hour of one GPU, assumed: about what marketplaces ask in 2025 and 2026."""
DISK_BYTES_PER_SECOND = 1e9
"""Of the file system that takes checkpoints, all ranks together; assumed: one NVMe disk."""
TOKENS = {"10 B": 10e9, "100 B": 100e9, "1 T": 1e12}
RANKS = (1, 8, 64)
CHECKPOINTS_KEPT, CHECKPOINT_MINUTES = 2, 5
"""The defaults of params: `checkpoints.keep` and `checkpoints.every_minutes`."""
BYTES_PER_TOKEN = 2
"""A vocabulary of up to 65,536."""
PATIENCE_DAYS = 30


@dataclass(frozen=True)
class Size:
    """A model and how it is trained."""

    name: str
    shape: dict[str, int]
    vocab_size: int
    sequence_length: int
    global_batch_size: int
    recompute: str
    tied: bool = False

    def params(self, parallelism: str, ranks: int, target: str) -> Params:
        variant = {
            "precision": "amp_bf16",
            "loss": "chunked",
            "recompute": self.recompute,
            "parallelism": parallelism,
            "micro_batch_size": "auto",
        }
        return check_params(
            {
                "seed": 0,
                "corpus": {"source": "embedded"},
                "tokenizer": {"vocab_size": self.vocab_size},
                "model": self.shape
                | {"max_position_embeddings": self.sequence_length, "tie_word_embeddings": self.tied},
                "training": {
                    "sequence_length": self.sequence_length,
                    "global_batch_size": self.global_batch_size,
                    "token_budget": 10**10,
                    "learning_rate": 3e-4,
                    "ranks": ranks,
                },
                "hardware": {"target": target, "device": "cuda", "price_per_hour": PRICES[target]},
                "variants": {"v": variant},
            }
        )


SIZES = [
    Size(
        "124 M (the shape of GPT-2 small)",
        {
            "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
            "intermediate_size": 2048,
        },
        50_304, 1024, 512, "none", tied=True,
    ),
    Size(
        "1.1 B (TinyLlama)",
        {
            "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
            "intermediate_size": 5632,
        },
        32_000, 2048, 1024, "every_block",
    ),
    Size(
        "6.7 B (Llama 2 7B)",
        {
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "intermediate_size": 11008,
        },
        32_000, 4096, 1024, "every_block",
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One size on so many GPUs."""

    size: Size
    target: Target
    ranks: int
    parallelism: str
    recipe: VariantParams
    """With the largest micro-batch that fits; where none does, with micro-batch 1."""
    fits: bool
    needed_bytes: int
    memory: MemoryPrediction
    forecast: Forecast

    @property
    def days(self) -> dict[str, tuple[float, float]]:
        best, worst = self.forecast.tokens_per_second
        return {name: (tokens / best / 86400, tokens / worst / 86400) for name, tokens in TOKENS.items()}


def main() -> int:
    begun = time.perf_counter()
    plans = [
        plan
        for size in SIZES
        for ranks in RANKS
        for parallelism in (("ddp", "fsdp_cpu_offload") if ranks == 1 else ("ddp", "fsdp"))
        for plan in _plans(size, parallelism, ranks)
    ]
    page = "\n".join(_page(plans)) + "\n"
    print(page)
    RESULTS.write_text(page, encoding="utf-8")
    print(f"{time.perf_counter() - begun:.0f} s", file=sys.stderr)
    return 0


def _plans(size: Size, parallelism: str, ranks: int) -> list[Plan]:
    """One for each GPU; GPUs with the same kernels share predictions."""
    made: dict[object, MemoryPrediction] = {}
    plans = []
    for name in PRICES:
        params = size.params(parallelism, ranks, name)
        predictions = Predictions(params, machine_of(params.hardware), made=made)
        (sized,) = candidates_of(params, params.variants["v"])
        found = largest_micro_batch(predictions, sized).recipe
        recipe = found or sized[0]
        needed = predictions.needed_bytes(recipe)
        speed = forecast(params.model, size.vocab_size, params.training, recipe, TARGETS[name], PRICES[name])
        memory = predictions.of(recipe)
        fits = found is not None
        plans.append(Plan(size, TARGETS[name], ranks, parallelism, recipe, fits, needed, memory, speed))
        print(f"{size.name}, {ranks} x {name}, {parallelism}", file=sys.stderr)
    return plans


def _page(plans: list[Plan]) -> list[str]:
    prices = ", ".join(f"{TARGETS[name].label} {price:.2f}" for name, price in PRICES.items())
    return [
        "# Scale on paper",
        "",
        "Made by `python -m benchmarks.scale_on_paper`; nothing here was measured. Memory is predicted by "
        "tracing the step of one rank; speed is a forecast from data sheets, best and worst case. amp_bf16, "
        "loss chunked; the micro-batch is the largest that fits.",
        "",
        f"Assumed: USD for an hour of one GPU: {prices}. Checkpoints go to a file system that takes "
        f"{DISK_BYTES_PER_SECOND / 1e9:g} GB/s from all ranks together. Eight GPUs a machine; links as in "
        "stages/measure/targets.py.",
        "",
        "| model | parameters | sequence | sequences in a step | tokens in a step | recompute |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        *(_size_row(size) for size in SIZES),
        "",
        "## Memory of each GPU, and speed",
        "",
        "Needed: the predicted peak and the allowances. tokens/s: of all GPUs together.",
        "",
        "| model | GPUs | | "
        + " | ".join(f"{TARGETS[name].label}: needed | tokens/s" for name in PRICES)
        + " |",
        "| --- | ---: | --- |" + " --- | ---: |" * len(PRICES),
        *_memory_rows(plans),
        "",
        "## Days and cost",
        "",
        "Of the faster of what fits. Cost in thousands of USD.",
        "",
        "| model | GPUs | | " + " | ".join(TOKENS) + " |",
        "| --- | ---: | --- |" + " --- |" * len(TOKENS),
        *_time_rows(plans),
        "",
        "## Storage",
        "",
        "A checkpoint is weights and both moments in fp32, 12 bytes a parameter. Tokens are 2 bytes each.",
        "",
        f"| model | checkpoint | {CHECKPOINTS_KEPT} kept | to write one "
        f"| of every {CHECKPOINT_MINUTES} minutes |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(_checkpoint_row(size) for size in SIZES),
        "",
        "| tokens | " + " | ".join(TOKENS) + " |",
        "| --- |" + " ---: |" * len(TOKENS),
        "| token files | "
        + " | ".join(f"{tokens * BYTES_PER_TOKEN / 1e9:,.0f} GB" for tokens in TOKENS.values())
        + " |",
        "",
        "## What breaks first",
        "",
        *_breaks(plans),
    ]


def _size_row(size: Size) -> str:
    params = size.params("ddp", 1, next(iter(PRICES)))
    count = parameter_count(params.model, size.vocab_size)
    return (
        f"| {size.name} | {count / 1e6:,.0f} M | {size.sequence_length:,} | {size.global_batch_size:,} | "
        f"{size.global_batch_size * size.sequence_length / 1e6:.2f} M | {size.recompute} |"
    )


def _memory_rows(plans: list[Plan]) -> list[str]:
    rows: dict[tuple[str, int, str], list[str]] = {}
    for plan in plans:
        cells = rows.setdefault((plan.size.name, plan.ranks, plan.parallelism), [])
        host = f", host {readable_bytes(plan.memory.host_bytes)}" if plan.memory.host_bytes else ""
        batch = f"micro-batch {plan.recipe.micro_batch_size}"
        if plan.fits:
            cells += [f"{readable_bytes(plan.needed_bytes)}, {batch}{host}", _speeds(plan.forecast)]
        else:
            cells += [f"**{readable_bytes(plan.needed_bytes)}** at {batch}{host}: does not fit", "–"]
    return [
        f"| {name} | {ranks} | {kind} | {' | '.join(cells)} |" for (name, ranks, kind), cells in rows.items()
    ]


def _speeds(speed: Forecast) -> str:
    best, worst = speed.tokens_per_second
    return f"{_thousands(worst)} to {_thousands(best)}"


def _thousands(number: float) -> str:
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number / 1e3:.3g} k"


def _fastest(plans: list[Plan], size: Size, ranks: int, target: str) -> Plan | None:
    fitting = [p for p in plans if (p.size, p.ranks, p.target.name) == (size, ranks, target) and p.fits]
    return max(fitting, key=lambda plan: plan.forecast.middle_tokens_per_second, default=None)


def _time_rows(plans: list[Plan]) -> list[str]:
    rows = []
    for size in SIZES:
        for ranks in RANKS:
            for target in PRICES:
                if (plan := _fastest(plans, size, ranks, target)) is None:
                    continue
                cells = []
                for best, worst in plan.days.values():
                    low, high = (days * 24 * ranks * PRICES[target] / 1e3 for days in (best, worst))
                    cells.append(f"{_days(best)} to {_days(worst)}; {low:,.3g} to {high:,.3g}")
                who = f"{size.name} | {ranks} {plan.target.label} | {plan.parallelism}"
                rows.append(f"| {who} | {' | '.join(cells)} |")
    return rows


def _days(days: float) -> str:
    return f"{days * 24:.2g} h" if days < 1 else f"{days:,.0f} d" if days >= 10 else f"{days:.1f} d"


def _checkpoint_bytes(size: Size) -> int:
    params = size.params("ddp", 1, next(iter(PRICES)))
    return 12 * parameter_count(params.model, size.vocab_size)


def _checkpoint_row(size: Size) -> str:
    size_bytes = _checkpoint_bytes(size)
    seconds = size_bytes / DISK_BYTES_PER_SECOND
    share = seconds / (60 * CHECKPOINT_MINUTES)
    return (
        f"| {size.name} | {size_bytes / 1e9:.1f} GB | {CHECKPOINTS_KEPT * size_bytes / 1e9:.1f} GB | "
        f"{seconds:.0f} s | {share:.1%} |"
    )


def _breaks(plans: list[Plan]) -> list[str]:
    """A sentence for each size and GPU, from the numbers above."""
    lines = []
    for size in SIZES:
        for target in PRICES:
            label = TARGETS[target].label
            lines.append(f"- **{size.name}, {label}**: {_first_break(plans, size, target)}.")
    return lines


def _first_break(plans: list[Plan], size: Size, target: str) -> str:
    told = []
    (whole,) = [
        p for p in plans if (p.size, p.ranks, p.target.name, p.parallelism) == (size, 1, target, "ddp")
    ]
    if not whole.fits:
        state = whole.memory.parameters + whole.memory.optimizer_state + whole.memory.gradients
        told.append(
            f"memory: one GPU needs {readable_bytes(whole.needed_bytes)} at micro-batch 1, of which weights, "
            f"gradients and optimizer states are {readable_bytes(state)} whatever the batch"
        )
    for ranks in RANKS[1:]:
        fits = {p.parallelism: p for p in plans if (p.size, p.ranks, p.target.name) == (size, ranks, target)}
        if not fits["ddp"].fits and fits["fsdp"].fits:
            told.append(f"{ranks} GPUs hold it with fsdp alone ({readable_bytes(fits['fsdp'].needed_bytes)})")
        elif not fits["ddp"].fits:
            told.append(
                f"{ranks} GPUs do not hold it ({readable_bytes(fits['fsdp'].needed_bytes)} with fsdp)"
            )
    holds = any(_fastest(plans, size, ranks, target) is not None for ranks in RANKS)
    for name in TOKENS if holds else ():
        ranks_in_time = [
            ranks
            for ranks in RANKS
            if (plan := _fastest(plans, size, ranks, target)) is not None
            and plan.days[name][1] <= PATIENCE_DAYS
        ]
        within = f"{PATIENCE_DAYS} days at worst"
        told.append(
            f"{name} tokens take {ranks_in_time[0]} GPU{'s' * (ranks_in_time[0] > 1)} under {within}"
            if ranks_in_time
            else f"time: {name} tokens take even {RANKS[-1]} GPUs more than {within}"
        )
    most = _fastest(plans, size, RANKS[-1], target)
    one = _fastest(plans, size, RANKS[1], target)
    if most is not None and one is not None:
        share = (
            most.forecast.tokens_per_second[1] * RANKS[1] / (one.forecast.tokens_per_second[1] * RANKS[-1])
        )
        told.append(
            f"at worst {RANKS[-1]} GPUs train at {share:.0%} of the speed a GPU that {RANKS[1]} have"
            + (", so the network between machines breaks first there" if share < 0.5 else "")
        )
    seconds = _checkpoint_bytes(size) / DISK_BYTES_PER_SECOND
    if seconds > 0.1 * 60 * CHECKPOINT_MINUTES:
        busy = seconds / 60 / CHECKPOINT_MINUTES
        told.append(
            f"a checkpoint every {CHECKPOINT_MINUTES} minutes keeps the file system busy {busy:.0%} of the "
            "time, beside the training: save less often, or to a faster one"
        )
    return "; ".join(told)


if __name__ == "__main__":
    sys.exit(main())
