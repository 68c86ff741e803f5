"""The tables of docs/planning.md and docs/techniques.md: `python -m benchmarks.plan_reference`.

Everything here is predicted; it needs no GPU. Also prints what planning itself takes, in a process of its
own for each model: seconds with all imports, and peak resident memory.
"""

import resource
import subprocess
import sys
import time
from typing import Any

from stages.measure.units import readable_bytes
from stages.memory import predict
from stages.memory.candidates import recipe_words
from stages.memory.fit import Predictions, fit_variant, forecast_of, largest_micro_batch
from stages.memory.machine import machine_of
from stages.params import ModelParams, Params, TrainingParams, VariantParams, load_params
from stages.params.section import divisors

PRESET = "presets/gpu_12gb.yaml"
GLOBAL_BATCH_SIZE = 192

AMP: dict[str, Any] = {"precision": "amp_bf16"}
CHUNKED = AMP | {"loss": "chunked"}
LEAN = CHUNKED | {"recompute": "every_block"}
RECIPES: list[dict[str, Any]] = [
    {},
    AMP,
    AMP | {"recompute": "selective"},
    AMP | {"recompute": "every_block"},
    CHUNKED,
    CHUNKED | {"compile": "blocks"},
    CHUNKED | {"recompute": "selective"},
    LEAN,
    LEAN | {"compile": "blocks"},
    LEAN | {"optimizer": "adamw_8bit"},
    LEAN | {"precision": "bf16"},
]

SEVEN_BILLION = ModelParams(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    intermediate_size=14336, max_position_embeddings=2048,
)  # fmt: skip


def main() -> None:
    if sys.argv[1:]:
        _predict_once(sys.argv[1])
        return
    params = _reference()
    _print_fits(params)
    _print_search(params)
    _print_peaks(params)
    _print_cost()


def _reference() -> Params:
    preset = load_params(PRESET)
    training = preset.training.model_copy(update={"global_batch_size": GLOBAL_BATCH_SIZE})
    return preset.model_copy(update={"training": training})


def _print_fits(params: Params) -> None:
    predictions = Predictions(params, machine_of(params.hardware))
    capacity = predictions.machine.capacity_bytes
    print(f"\n{params.hardware.target}, {readable_bytes(capacity or 0)} after the reserve\n")
    print("| recipe | needed at micro-batch 8 | max | needed there | next needs | tokens/s, forecast |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for techniques in RECIPES:
        recipes = [VariantParams(micro_batch_size=n, **techniques) for n in divisors(GLOBAL_BATCH_SIZE)]
        found = largest_micro_batch(predictions, recipes)
        (eight,) = [recipe for recipe in recipes if recipe.micro_batch_size == 8]
        cells = [recipe_words(eight), readable_bytes(predictions.needed_bytes(eight))]
        if found.recipe is None:
            cells += ["–", "–", "–", "–"]
        else:
            speed = forecast_of(params, found.recipe, predictions.machine)
            high, low = speed.tokens_per_second if speed else (0.0, 0.0)
            cells += [
                str(found.recipe.micro_batch_size),
                readable_bytes(predictions.needed_bytes(found.recipe)),
            ]
            cells += [_next(predictions, found.next_larger), f"{low / 1e3:.1f} to {high / 1e3:.1f} k"]
        print(f"| {' | '.join(cells)} |", flush=True)


def _next(predictions: Predictions, larger: VariantParams | None) -> str:
    if larger is None:
        return "–"
    return f"{larger.micro_batch_size}: {readable_bytes(predictions.needed_bytes(larger))}"


def _print_search(params: Params) -> None:
    started = time.perf_counter()
    for entry in fit_variant(Predictions(params, machine_of(params.hardware)), "fitted").considered:
        print(entry)
    print(f"the search: {time.perf_counter() - started:.0f} s", flush=True)


def _print_peaks(params: Params) -> None:
    print("\n| variant, predicted peak on CUDA | micro-batch 8 | micro-batch 64 |")
    print("| --- | ---: | ---: |")
    training = params.training.model_copy(update={"global_batch_size": 64})
    for techniques in [*RECIPES, LEAN | {"optimizer": "muon"}, {"recompute": "every_block"}]:
        peaks = [
            predict(
                params.model, params.tokenizer.vocab_size,
                training.model_copy(update={"global_batch_size": n}),
                VariantParams(micro_batch_size=n, **techniques), "cuda",
            ).peak_bytes
            for n in (8, 64)
        ]  # fmt: skip
        words = recipe_words(VariantParams(micro_batch_size=8, **techniques))
        print(f"| {words} | {' | '.join(readable_bytes(peak) for peak in peaks)} |", flush=True)


def _print_cost() -> None:
    print("\n| planned | seconds, imports included | peak RSS |")
    print("| --- | ---: | ---: |")
    for name in ("reference", "seven_billion"):
        started = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.plan_reference", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        words, rss = done.stdout.strip().split("|")
        print(f"| {words} | {time.perf_counter() - started:.1f} | {rss} |", flush=True)


def _predict_once(name: str) -> None:
    params = _reference()
    model, vocab_size, training = params.model, params.tokenizer.vocab_size, params.training
    micro_batch_size = 64
    if name == "seven_billion":
        model, vocab_size, micro_batch_size = SEVEN_BILLION, 128_000, 4
        training = TrainingParams(
            sequence_length=2048, global_batch_size=8, token_budget=10**9, learning_rate=1e-4
        )
    variant = VariantParams(micro_batch_size=micro_batch_size, **LEAN)
    peak = predict(model, vocab_size, training, variant, "cuda").peak_bytes
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{name}, {recipe_words(variant)}, peak {readable_bytes(peak)}|{readable_bytes(rss)}")


if __name__ == "__main__":
    main()
