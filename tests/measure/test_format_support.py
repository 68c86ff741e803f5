"""What works is checked against torch itself, called here directly; speeds are only checked to exist."""

import re
from typing import Any

import pytest
import torch

from stages.measure import format_support
from stages.measure.format_support import YES, FormatSupport, measure_speed, try_format
from stages.measure.number_formats import (
    BF16,
    E8M0,
    FP4_E2M1,
    FP6_E2M3,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FP64,
    NUMBER_FORMATS,
    TF32,
    NumberFormat,
    measure_rounding,
)

CPU = torch.device("cpu")
TORCH_FORMATS = [f for f in NUMBER_FORMATS if f.dtype is not None]
OPERATIONS = ("create", "from_fp32", "to_fp32", "add", "matmul", "autocast", "scaled_matmul")
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def name_of(number_format: NumberFormat) -> str:
    return number_format.name


def refusal(operation) -> str | None:
    """What torch says when asked directly; None when it does it."""
    try:
        operation()
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("number_format", TORCH_FORMATS, ids=name_of)
def test_verdicts_are_torchs_own(number_format: NumberFormat) -> None:
    dtype = number_format.dtype
    assert dtype is not None
    support = try_format(number_format, CPU)
    direct = {
        "create": lambda: torch.zeros(4, dtype=dtype),
        "from_fp32": lambda: torch.ones(4).to(dtype),
        "to_fp32": lambda: torch.zeros(4, dtype=dtype).to(torch.float32),
        "add": lambda: torch.ones(4, dtype=dtype) + torch.ones(4, dtype=dtype),
        "matmul": lambda: torch.ones(16, 16).to(dtype) @ torch.ones(16, 16).to(dtype),
    }
    for operation, call in direct.items():
        expected = refusal(call)
        assert getattr(support, operation) == (YES if expected is None else expected), operation


@pytest.mark.parametrize("number_format", NUMBER_FORMATS, ids=name_of)
def test_a_verdict_is_yes_or_one_short_line(number_format: NumberFormat) -> None:
    support = try_format(number_format, CPU)
    for operation in OPERATIONS:
        verdict = getattr(support, operation)
        assert verdict.startswith(YES) or 5 < len(verdict) <= 160
        assert "\n" not in verdict


def test_cpu_autocast_knows_bf16_and_fp16_alone() -> None:
    verdicts = {f.name: try_format(f, CPU).autocast for f in TORCH_FORMATS}
    assert {name for name, verdict in verdicts.items() if verdict == YES} == {"bf16", "fp16"}
    assert "CPU Autocast only supports" in verdicts["fp32"]


def test_formats_without_a_type_say_so() -> None:
    support = try_format(FP6_E2M3, CPU)
    assert {getattr(support, o) for o in OPERATIONS} == {
        f"torch {torch.__version__.split('+')[0]} has no type for fp6 e2m3"
    }
    tf32 = try_format(TF32, CPU)
    assert "CUDA" in tf32.matmul
    assert "no type of its own" in tf32.add


@pytest.mark.parametrize("number_format", [FP64, FP32, BF16, FP16, FP8_E4M3, FP8_E5M2], ids=name_of)
def test_products_are_as_exact_as_the_format(number_format: NumberFormat) -> None:
    support = try_format(number_format, CPU)
    eps = float(number_format.eps)
    assert support.matmul_relative_error is not None
    if number_format == FP64:
        assert support.matmul_relative_error < 1e-14
    else:
        # Rounding the result once gives about eps / 4 on average; fp32 adds up in fp32 besides.
        assert eps / 16 < support.matmul_relative_error < 4 * eps


def test_a_wrong_product_is_no_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **named: real(*args, **named) / 4)
    support = try_format(FP8_E4M3, CPU)
    assert support.scaled_matmul == "ran, but the product is off by 75.0%"
    assert support.scaled_matmul_relative_error is None
    assert measure_speed(FP8_E4M3, support, CPU, 0.001).scaled_matmul_speed is None


def test_e5m2_that_needs_a_partner_is_tried_with_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where the product of two e5m2 matrices is refused."""
    real = torch._scaled_mm

    def as_on_cuda(a: torch.Tensor, b: torch.Tensor, **named: Any) -> torch.Tensor:
        if a.dtype == b.dtype == torch.float8_e5m2:
            raise ValueError("Multiplication of two Float8_e5m2 matrices is not supported")
        return real(a, b, **named)

    monkeypatch.setattr(torch, "_scaled_mm", as_on_cuda)
    support = try_format(FP8_E5M2, CPU)
    assert support.scaled_matmul == "yes, times e4m3"
    assert support.scaled_matmul_relative_error is not None
    assert measure_speed(FP8_E5M2, support, CPU, 0.001).scaled_matmul_speed is not None


def test_reasons_lose_call_stacks_and_end_with_a_sentence() -> None:
    def fails() -> None:
        raise RuntimeError(
            "No such kernel.\n  Try another. Exception raised from run at file.cpp:3 " + "x" * 500
        )

    assert format_support._attempt(fails) == "No such kernel. Try another."

    def fails_at_length() -> None:
        raise RuntimeError("Not here. " + "word " * 100)

    assert format_support._attempt(fails_at_length) == "Not here."

    def fails_silently() -> None:
        raise NotImplementedError

    assert format_support._attempt(fails_silently) == "NotImplementedError"


def test_fp4_bytes_hold_two_numbers_low_half_first() -> None:
    codes = torch.tensor([[0x21, 0xF7]], dtype=torch.uint8)
    assert format_support._fp4_values(codes).tolist() == [[0.5, 1.0, 6.0, -6.0]]


def test_speeds_of_what_works_and_nothing_else() -> None:
    for number_format in (FP64, FP16, FP8_E4M3, E8M0, FP4_E2M1, TF32):
        support = measure_speed(number_format, try_format(number_format, CPU), CPU, budget_seconds=0.002)
        for verdict, speed in (
            (support.matmul, support.matmul_speed),
            (support.scaled_matmul, support.scaled_matmul_speed),
        ):
            assert (speed is not None) == verdict.startswith(YES)
            if speed is not None:
                assert speed.flops_per_second > 0
                size = re.match(r"measured (\d+)x\1x\1 (.+)", speed.source)
                assert size is not None
                assert int(size[1]) >= 128
                assert size[2].startswith(number_format.name)


def test_leaves_torchs_settings_and_random_state_alone() -> None:
    before = torch.get_rng_state()
    torch.set_float32_matmul_precision("medium")
    try:
        for number_format in (FP32, TF32, FP8_E4M3):
            measure_speed(number_format, try_format(number_format, CPU), CPU, budget_seconds=0.001)
            measure_rounding(number_format, CPU)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("number_format", [FP64, FP32, BF16, FP16], ids=name_of)
def test_rounding_of_the_types_that_add(number_format: NumberFormat) -> None:
    rounding = measure_rounding(number_format, CPU)
    assert rounding is not None
    assert rounding.arithmetic == "in the format"
    eps = float(number_format.eps)
    assert rounding.one_plus_half_eps == 1
    assert rounding.one_plus_three_half_eps == 1 + 2 * eps
    # A tie goes to the even 1, so the next number of the format above the tie is the first to count.
    assert rounding.least_increase_of_one == eps / 2 * (1 + eps)
    assert rounding.least_decrease_of_one == eps / 4 * (1 + eps)
    assert rounding.first_lost_integer_becomes == rounding.first_lost_integer - 1


@pytest.mark.parametrize("number_format", [BF16, FP16], ids=name_of)
def test_small_updates_vanish_in_16_bits(number_format: NumberFormat) -> None:
    rounding, in_fp32 = measure_rounding(number_format, CPU), measure_rounding(FP32, CPU)
    assert rounding is not None
    assert in_fp32 is not None
    assert rounding.one_after_small_updates == 1
    assert in_fp32.one_after_small_updates == pytest.approx(0.97, abs=1e-4)


def test_a_scale_saves_fp16_gradients_and_bf16_needs_none() -> None:
    fp16, bf16 = measure_rounding(FP16, CPU), measure_rounding(BF16, CPU)
    assert fp16 is not None
    assert bf16 is not None
    assert fp16.cast_of_small_gradient == 0
    assert fp16.small_gradient_with_scale == pytest.approx(1e-8, rel=float(FP16.eps))
    assert bf16.cast_of_small_gradient == pytest.approx(1e-8, rel=float(BF16.eps))


@pytest.mark.parametrize("number_format", [FP32, BF16, FP16, FP8_E5M2], ids=name_of)
def test_overflow_starts_half_a_step_above_max(number_format: NumberFormat) -> None:
    rounding = measure_rounding(number_format, CPU)
    assert rounding is not None
    # The step above max is what it is below it: max is (2 - eps) times a power of two.
    step = number_format.max * number_format.eps / (2 - number_format.eps)
    assert rounding.overflows_from == float(number_format.max + step / 2)
    assert rounding.cast_of_twice_max == rounding.cast_of_infinity == float("inf")
    if number_format == FP16:
        assert rounding.overflows_from == 65520


def test_e4m3_casts_saturate_on_this_cpu() -> None:
    rounding = measure_rounding(FP8_E4M3, CPU)
    assert rounding is not None
    assert rounding.arithmetic == "fp32, then cast"
    assert rounding.overflows_from is None
    assert rounding.cast_of_twice_max == rounding.cast_of_infinity == 448


@pytest.mark.parametrize("number_format", [TF32, FP6_E2M3, FP4_E2M1], ids=name_of)
def test_no_rounding_without_a_cast(number_format: NumberFormat) -> None:
    assert measure_rounding(number_format, CPU) is None


@pytest.mark.gpu
@cuda_only
def test_on_cuda() -> None:
    device = torch.device("cuda")
    capability = torch.cuda.get_device_capability()
    found: dict[str, FormatSupport] = {f.name: try_format(f, device) for f in NUMBER_FORMATS}
    for name in ("fp64", "fp32", "fp16"):
        assert found[name].matmul == YES
    assert found["fp16"].autocast == YES
    assert (found["tf32"].matmul == YES) == (capability >= (8, 0))
    if capability >= (8, 0):
        tf32_error = found["tf32"].matmul_relative_error
        assert tf32_error is not None
        assert 1e-5 < tf32_error < 1e-2
        fp32_error = found["fp32"].matmul_relative_error
        assert fp32_error is not None
        assert fp32_error < 1e-5
    assert found["fp8 e4m3"].scaled_matmul.startswith(YES) == (capability >= (8, 9))
    assert found["fp8 e5m2"].scaled_matmul.startswith(YES) == (capability >= (8, 9))
    for number_format in NUMBER_FORMATS:
        assert measure_rounding(number_format, device) is None or number_format.dtype is not None
