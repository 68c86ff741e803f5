"""The search for what fits: right, reproducible, and with few predictions."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.measure.forecast import forecast
from stages.measure.targets import TARGETS
from stages.memory.candidates import candidates_of, recipe_words
from stages.memory.fit import ESTIMATE_MARGIN, FitError, Predictions, fit_variant, largest_micro_batch
from stages.memory.leaner_recipes import change_that_fits
from stages.memory.machine import machine_of, unsupported
from stages.params import HardwareParams, Params, VariantParams, check_params
from tests.training.small_run import small_params

GIB = 2**30
MADE: dict[object, Any] = {}
"""Shared by the tests: of one small model, on a CPU, with a global batch of 24."""


def params_with(variant: dict[str, Any], memory_bytes: int | None, **hardware: Any) -> Params:
    raw = small_params(
        {"micro_batch_size": 24}, global_batch_size=24, sequence_length=32, token_budget=100_000
    ).model_dump()
    memory = {} if memory_bytes is None else {"memory_gib": memory_bytes / GIB, "memory_reserve_gib": 0}
    return check_params(raw | {"hardware": {"device": "cpu"} | memory | hardware, "variants": {"v": variant}})


def predictions_of(params: Params, asked: list[str] | None = None) -> Predictions:
    announce = asked.append if asked is not None else lambda _: None
    return Predictions(params, machine_of(params.hardware), announce, {} if asked is not None else MADE)


def needs(variant: dict[str, Any]) -> int:
    params = params_with(variant, None)
    return predictions_of(params).needed_bytes(params.variants["v"])


SIZES = (1, 2, 3, 4, 6, 8, 12, 24)


@settings(max_examples=25)
@given(st.floats(0.7, 1.3), st.sampled_from(SIZES), st.sampled_from(["full", "chunked"]))
def test_finds_what_trying_all_would_find(share: float, around: int, loss: str) -> None:
    keys: dict[str, Any] = {"loss": loss, "loss_chunk_tokens": 16}
    capacity = int(share * needs(keys | {"micro_batch_size": around}))
    fitting = [size for size in SIZES if needs(keys | {"micro_batch_size": size}) <= capacity]
    predictions = predictions_of(params_with(keys | {"micro_batch_size": 24}, capacity))
    (sized,) = candidates_of(predictions.params, predictions.params.variants["v"])
    found = largest_micro_batch(predictions, sized)
    assert (found.recipe.micro_batch_size if found.recipe else None) == (fitting[-1] if fitting else None)
    if found.next_larger is not None:
        assert not predictions.fits(found.next_larger)


def test_asks_for_few_predictions() -> None:
    asked: list[str] = []
    capacity = needs({"micro_batch_size": 6}) + 1
    predictions = predictions_of(params_with({"micro_batch_size": "auto"}, capacity), asked)
    fit = fit_variant(predictions, "v")
    assert fit.recipe.micro_batch_size == 6
    assert len(asked) <= 4, "all of it, the smallest, the one that fits, the one above it"
    assert [(entry.recipe.micro_batch_size, entry.verdict) for entry in fit.considered] == [
        (8, "does not fit"),
        (6, "chosen"),
    ]


def test_all_of_the_global_batch_may_fit_where_less_does_not() -> None:
    """Without accumulation no gradients wait, so the largest divisor is asked first."""
    asked: list[str] = []
    predictions = predictions_of(params_with({"micro_batch_size": "auto"}, GIB), asked)
    fit = fit_variant(predictions, "v")
    assert (fit.recipe.micro_batch_size, len(asked)) == (24, 1)


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_fit_chooses_the_fastest_that_fits(share: float) -> None:
    """Held against the largest micro-batch of every group; without a target they are ranked as on an A100."""
    keys = {"fit": "auto", "loss_chunk_tokens": 256}
    largest = needs({"micro_batch_size": 24, "loss_chunk_tokens": 256})
    predictions = predictions_of(params_with(keys, int(share * largest)))
    params = predictions.params
    groups = candidates_of(params, params.variants["v"])
    assert len(groups) == 6
    found = [largest_micro_batch(predictions, group).recipe for group in groups]
    fitting = [recipe for recipe in found if recipe is not None]

    def speed(recipe: VariantParams) -> float:
        vocab_size, target = params.tokenizer.vocab_size, TARGETS["a100_80gb"]
        return forecast(params.model, vocab_size, params.training, recipe, target).middle_tokens_per_second

    fit = fit_variant(predictions, "v")
    assert speed(fit.recipe) == max(speed(recipe) for recipe in fitting)
    assert type(fit.recipe) is VariantParams
    assert len([entry for entry in fit.considered if entry.verdict == "chosen"]) == 1


def test_fit_keeps_what_is_written() -> None:
    written = {"fit": "auto", "recompute": "every_block", "precision": "amp_bf16", "optimizer": "adamw_8bit"}
    fit = fit_variant(predictions_of(params_with(written, GIB)), "v")
    kept = {entry.recipe.recompute for entry in fit.considered}
    assert kept == {"every_block"}
    assert {entry.recipe.loss for entry in fit.considered} == {"full", "chunked"}
    assert (fit.recipe.precision, fit.recipe.optimizer, fit.recipe.compile) == (
        "amp_bf16",
        "adamw_8bit",
        "off",
    )


def test_what_was_not_predicted_could_not_have_won() -> None:
    params = params_with({"fit": "auto"}, 40 * GIB, device="cuda", target="a100_80gb")
    fit = fit_variant(predictions_of(params), "v")
    (chosen,) = [entry for entry in fit.considered if entry.verdict == "chosen"]
    assert chosen.recipe == fit.recipe and chosen.needed_bytes is not None and chosen.forecast is not None
    rest = [entry for entry in fit.considered if entry.needed_bytes is None]
    assert len(rest) == 5
    for entry in rest:
        assert entry.forecast is not None
        assert entry.forecast.middle_tokens_per_second <= chosen.forecast.middle_tokens_per_second


def test_nothing_fits() -> None:
    params = params_with({"fit": "auto"}, 1000)
    with pytest.raises(FitError) as error:
        fit_variant(predictions_of(params), "v")
    message = str(error.value)
    assert message.startswith("variants.v: nothing fits 0.0 MiB (CPU less hardware.memory_reserve_gib); the ")
    assert "with micro_batch_size 1 and needs 0." in message
    assert message.endswith("or a larger target")


def test_an_optimizer_in_backward_gets_the_whole_batch_or_nothing() -> None:
    raw = params_with({"micro_batch_size": 24}, GIB).model_dump()
    raw["training"]["max_grad_norm"] = None
    raw["variants"]["v"] = {"micro_batch_size": "auto", "optimizer_in_backward": True}
    params = check_params(raw)
    (sized,) = candidates_of(params, params.variants["v"])
    assert [recipe.micro_batch_size for recipe in sized] == [24]


def test_a_compiled_variant_must_fit_with_the_error_of_its_estimate() -> None:
    params = params_with({"micro_batch_size": 2, "compile": "blocks"}, GIB)
    predictions = predictions_of(params)
    recipe = params.variants["v"]
    peak = predictions.of(recipe).peak_bytes
    assert predictions.allowances(recipe)[ESTIMATE_MARGIN] == int(0.1 * peak)
    assert predictions.needed_bytes(recipe) == peak + int(0.1 * peak)


def test_machines_with_the_same_kernels_share_predictions() -> None:
    asked: list[str] = []
    made: dict[object, Any] = {}
    for target in ("rtx_3060_12gb", "rtx_3090", "t4", "rtx_a6000"):
        params = params_with({"micro_batch_size": 24}, None, device="cuda", target=target)
        Predictions(params, machine_of(params.hardware), asked.append, made).of(params.variants["v"])
    assert len(asked) == 2, "flash attention from compute capability 8.0 on, and without"


def test_the_machine_follows_from_params_alone() -> None:
    gpu = machine_of(HardwareParams(target="rtx_3060_12gb", memory_reserve_gib=1))
    assert (gpu.device, gpu.compute_capability) == ("cuda", (8, 6))
    assert gpu.capacity_bytes == TARGETS["rtx_3060_12gb"].memory_bytes - GIB
    assert machine_of(HardwareParams(target="h200", memory_gib=24)).capacity_bytes == int(23.75 * GIB)
    assert machine_of(HardwareParams()).capacity_bytes is None
    assert machine_of(HardwareParams()).device == "cpu"
    assert machine_of(HardwareParams(device="cuda", memory_gib=8)).device == "cuda"


def test_what_a_gpu_cannot_compute() -> None:
    model = params_with({"micro_batch_size": 1}, None).model
    a100, t4, h200 = (machine_of(HardwareParams(target=name)) for name in ("a100_40gb", "t4", "h200"))
    recipe = VariantParams(micro_batch_size=1, precision="amp_bf16")
    assert unsupported(model, recipe, a100) is None
    assert unsupported(model, recipe, t4) == (
        "precision: amp_bf16 needs compute capability 8.0 and T4 has 7.5; use amp_fp16 or fp32"
    )
    odd_heads = model.model_copy(update={"hidden_size": 40, "num_attention_heads": 2})
    assert "head size of 20" in (unsupported(odd_heads, recipe, a100) or "")
    assert unsupported(odd_heads, recipe, machine_of(HardwareParams(device="cpu"))) is None
    odd_width = model.model_copy(update={"intermediate_size": 72})
    in_8_bits = VariantParams(micro_batch_size=1, precision="fp8")
    assert "model.intermediate_size" in (unsupported(odd_width, in_8_bits, h200) or "")


def test_the_change_that_is_advised_fits() -> None:
    written = {"micro_batch_size": 24, "loss_chunk_tokens": 16}
    capacity = needs(written | {"micro_batch_size": 8})
    params = params_with(written, capacity)
    assert change_that_fits(predictions_of(params), params.variants["v"]) == "micro_batch_size: 8"
    smallest = needs(written | {"micro_batch_size": 1})
    params = params_with(written, smallest - 1)
    advised = change_that_fits(predictions_of(params), params.variants["v"])
    assert advised is None or advised.split(", ")[1:] != []
    assert change_that_fits(predictions_of(params_with(written, 1000)), params.variants["v"]) is None


def test_recipes_in_words() -> None:
    assert recipe_words(VariantParams(micro_batch_size=1)) == "fp32"
    recipe = VariantParams(
        micro_batch_size=1, precision="bf16", recompute={"every_n_blocks": 2}, optimizer_in_backward=True
    )
    assert recipe_words(recipe) == "bf16, recompute every_n_blocks 2, optimizer in backward"
