"""The forecast: ranges that follow the work and the ceilings."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.measure.flops import model_flops_per_token
from stages.measure.forecast import TENSOR_CORE_EFFICIENCY, Forecast, forecast, no_forecast_reason
from stages.measure.targets import TARGETS
from stages.params import TrainingParams, VariantParams
from tests.reference_model import REFERENCE

TRAINING = TrainingParams(
    sequence_length=512, global_batch_size=64, token_budget=100_000_000, learning_rate=1e-3
)
VOCAB = 50_000


def forecast_of(target: str = "a100_80gb", price: float | None = None, **techniques: Any) -> Forecast:
    recipe = VariantParams(**{"micro_batch_size": 16, "precision": "amp_bf16"} | techniques)
    return forecast(REFERENCE, VOCAB, TRAINING, recipe, TARGETS[target], price)


def test_a_range_in_which_everything_agrees() -> None:
    found = forecast_of(price=2.0)
    for case in (0, 1):
        assert found.tokens_per_second[case] == pytest.approx(64 * 512 / found.step_seconds[case])
        assert found.hours[case] == pytest.approx(TRAINING.num_steps * found.step_seconds[case] / 3600)
    best, worst = found.tokens_per_second
    assert 1.2 < best / worst < 2.5
    assert worst < found.middle_tokens_per_second < best
    assert found.cost_per_billion_tokens == pytest.approx((2e9 / 3600 / best, 2e9 / 3600 / worst))
    assert forecast_of().cost_per_billion_tokens is None


@pytest.mark.parametrize("target", TARGETS)
def test_never_faster_than_the_products_alone(target: str) -> None:
    for precision, kind in (("fp32", "fp32"), ("amp_fp16", "fp16")):
        best = forecast_of(target, precision=precision).tokens_per_second[0]
        peak = TARGETS[target].peak_flops_per_second[kind]  # type: ignore[index]
        # Half of attention's square is skipped by the kernels and counted as model FLOPs.
        products = 0.9 * model_flops_per_token(REFERENCE, VOCAB, 512)
        ceiling = peak / products * (1 if kind == "fp32" else TENSOR_CORE_EFFICIENCY[0])
        assert 0.1 * ceiling < best < ceiling


def test_what_costs_work_is_slower() -> None:
    plain = forecast_of().middle_tokens_per_second
    selective = forecast_of(recompute="selective").middle_tokens_per_second
    half = forecast_of(recompute={"every_n_blocks": 2}).middle_tokens_per_second
    every = forecast_of(recompute="every_block").middle_tokens_per_second
    assert plain > selective > half > every > 0.7 * plain
    assert forecast_of(compile="blocks").middle_tokens_per_second > plain
    assert forecast_of(optimizer="muon").middle_tokens_per_second < plain
    assert forecast_of(precision="tf32").middle_tokens_per_second < plain
    assert forecast_of("h100_80gb", precision="fp8").middle_tokens_per_second > plain


def test_tf32_is_never_forecast_behind_fp32() -> None:
    for name, target in TARGETS.items():
        if "tf32" in target.peak_flops_per_second:
            speeds = [forecast_of(name, precision=p).middle_tokens_per_second for p in ("tf32", "fp32")]
            assert speeds[0] >= speeds[1], name


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(TARGETS)),
    st.sampled_from(["fp32", "amp_fp16"]),
    st.sampled_from(["none", "selective", "every_block"]),
    st.sampled_from(["full", "chunked"]),
    st.sampled_from(["off", "blocks"]),
)
def test_a_larger_micro_batch_is_never_slower(
    target: str, precision: str, recompute: str, loss: str, compile: str
) -> None:
    """What the search for the fastest recipe rests on."""
    speeds = [
        forecast_of(
            target,
            micro_batch_size=size,
            precision=precision,
            recompute=recompute,
            loss=loss,
            compile=compile,
        ).middle_tokens_per_second
        for size in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in itertools.pairwise(speeds))


@pytest.mark.parametrize(
    ("target", "techniques", "reason"),
    [
        ("t4", {"precision": "amp_bf16"}, "T4 has no fast bf16 matrix products"),
        ("a100_40gb", {"precision": "fp8"}, "A100 40 GB has no fast fp8 matrix products"),
        ("t4", {"optimizer": "muon", "precision": "fp32"}, "no fast bf16"),
        ("h200", {"recompute": "offload"}, "depends on the machine around the GPU"),
        (None, {}, "hardware.target names no GPU"),
    ],
)
def test_where_there_is_no_forecast_it_says_why(
    target: str | None, techniques: dict[str, Any], reason: str
) -> None:
    recipe = VariantParams(micro_batch_size=1, **techniques)
    found = TARGETS[target] if target else None
    assert reason in (no_forecast_reason(recipe, found) or "")
    if found is not None:
        with pytest.raises(ValueError, match=reason):
            forecast(REFERENCE, VOCAB, TRAINING, recipe, found)
