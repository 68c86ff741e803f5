"""The floating-point formats of deep learning: the numbers each can hold, and what becomes of others.

A format is fixed by its fields (sign, exponent, mantissa), its exponent bias and what it does with
the highest bit patterns. Every limit follows from these; they are exact fractions here, because
the limits of fp64 itself are in the table. torch's own `torch.finfo` is what a program meets, so it
is taken where torch has the type, and the tests hold the two against each other.

Sources: IEEE 754-2019 (fp64, fp32, fp16); Kalamkar et al. 2019, arXiv:1905.12322 (bf16); NVIDIA A100
Tensor Core GPU Architecture whitepaper, 2020 (tf32); OCP 8-bit Floating Point Specification (OFP8)
1.0, 2023, and Micikevicius et al. 2022, arXiv:2209.05433 (e4m3, e5m2); OCP Microscaling Formats (MX)
Specification 1.0, 2023 (e8m0, e2m3, e3m2, e2m1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch

Specials = Literal["inf and nan", "nan", "none"]
SMALL_UPDATE = 1e-4
SMALL_UPDATES = 300
SMALL_GRADIENT = 1e-8
GRAD_SCALE = 65536.0
"""The scale that torch's GradScaler starts from."""


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format by its definition.

    A bit pattern with exponent field e and mantissa field m stands for
    `(1 + m / 2**mantissa_bits) * 2**(e - bias)`, or, where e is 0 and the format has subnormals, for
    `m / 2**mantissa_bits * 2**(1 - bias)`.
    """

    name: str
    sign_bits: int
    exponent_bits: int
    mantissa_bits: int
    """Stored fraction bits, without the implicit leading 1."""
    bias: int
    specials: Specials
    """inf and nan: the highest exponent is reserved for them (IEEE 754). nan: only the pattern of
    all ones in exponent and mantissa is NaN, and there is no infinity. none: every pattern is a
    finite number."""
    torch_name: str | None
    """Attribute of `torch`, None where torch has no such type."""
    standard: str
    has_subnormals: bool = True
    """False for a format whose exponent field 0 is an ordinary power of two: it has no zero."""
    storage_bits: int | None = None
    """Bits a value takes in memory where that is not the width of its fields."""

    @property
    def bits(self) -> int:
        return self.sign_bits + self.exponent_bits + self.mantissa_bits

    @property
    def dtype(self) -> torch.dtype | None:
        """torch's type; None where this torch has none."""
        return getattr(torch, self.torch_name, None) if self.torch_name else None

    @property
    def max(self) -> Fraction:
        """The largest finite number."""
        exponent = 2**self.exponent_bits - 1
        significand = 2 - self.eps
        if self.specials == "inf and nan" or (self.specials == "nan" and self.mantissa_bits == 0):
            exponent -= 1
        elif self.specials == "nan":
            significand -= self.eps
        return significand * _power_of_two(exponent - self.bias)

    @property
    def min(self) -> Fraction:
        """The lowest finite number: -max, or the smallest positive one where there is no sign."""
        return -self.max if self.sign_bits else self.smallest_normal

    @property
    def smallest_normal(self) -> Fraction:
        """The smallest positive number with the full precision."""
        return _power_of_two((1 if self.has_subnormals else 0) - self.bias)

    @property
    def smallest_subnormal(self) -> Fraction | None:
        """The smallest positive number, with one bit of precision; None without subnormals."""
        if not self.has_subnormals:
            return None
        return _power_of_two(1 - self.bias - self.mantissa_bits)

    @property
    def eps(self) -> Fraction:
        """Distance from 1 to the next larger number."""
        return _power_of_two(-self.mantissa_bits)


FP64 = NumberFormat("fp64", 1, 11, 52, 1023, "inf and nan", "float64", "IEEE 754")
FP32 = NumberFormat("fp32", 1, 8, 23, 127, "inf and nan", "float32", "IEEE 754")
TF32 = NumberFormat("tf32", 1, 8, 10, 127, "inf and nan", None, "NVIDIA", storage_bits=32)
"""No type of its own: fp32 numbers whose mantissa the tensor cores round when they read them."""
BF16 = NumberFormat("bf16", 1, 8, 7, 127, "inf and nan", "bfloat16", "bfloat16")
FP16 = NumberFormat("fp16", 1, 5, 10, 15, "inf and nan", "float16", "IEEE 754")
FP8_E4M3 = NumberFormat("fp8 e4m3", 1, 4, 3, 7, "nan", "float8_e4m3fn", "OCP OFP8")
FP8_E5M2 = NumberFormat("fp8 e5m2", 1, 5, 2, 15, "inf and nan", "float8_e5m2", "OCP OFP8")
E8M0 = NumberFormat("e8m0", 0, 8, 0, 127, "nan", "float8_e8m0fnu", "OCP MX", has_subnormals=False)
"""A power of two, the shared scale of a block of MX numbers; not a type to compute in."""
FP6_E2M3 = NumberFormat("fp6 e2m3", 1, 2, 3, 1, "none", None, "OCP MX")
FP6_E3M2 = NumberFormat("fp6 e3m2", 1, 3, 2, 3, "none", None, "OCP MX")
FP4_E2M1 = NumberFormat("fp4 e2m1", 1, 2, 1, 1, "none", "float4_e2m1fn_x2", "OCP MX")

NUMBER_FORMATS: tuple[NumberFormat, ...] = (
    FP64, FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2, E8M0, FP6_E2M3, FP6_E3M2, FP4_E2M1,
)  # fmt: skip
"""From the widest to the narrowest."""


@dataclass(frozen=True)
class Limits:
    """The range and precision of a format, exact."""

    max: Fraction
    min: Fraction
    smallest_normal: Fraction
    smallest_subnormal: Fraction | None
    """Always from the definition: `torch.finfo` does not have it."""
    eps: Fraction
    source: Literal["torch.finfo", "definition"]


def limits(number_format: NumberFormat) -> Limits:
    """The limits as torch states them, or by the format's definition where torch does not."""
    dtype = number_format.dtype
    if dtype is not None:
        try:
            info = torch.finfo(dtype)
            return Limits(
                max=Fraction(info.max),
                min=Fraction(info.min),
                smallest_normal=Fraction(info.smallest_normal),
                smallest_subnormal=number_format.smallest_subnormal,
                eps=Fraction(info.eps),
                source="torch.finfo",
            )
        except (RuntimeError, TypeError):
            # float4_e2m1fn_x2 exists, but is two numbers in one byte and has no finfo.
            pass
    return Limits(
        max=number_format.max,
        min=number_format.min,
        smallest_normal=number_format.smallest_normal,
        smallest_subnormal=number_format.smallest_subnormal,
        eps=number_format.eps,
        source="definition",
    )


@dataclass(frozen=True)
class Rounding:
    """What becomes of numbers that lie between, above and below those of a format, as measured."""

    arithmetic: Literal["in the format", "fp32, then cast"]
    """How a sum is made: by the type's own addition, or, where it has none, in fp32."""
    one_plus_half_eps: float
    """Exactly between 1 and the next number: 1 when ties go to even."""
    one_plus_three_half_eps: float
    """Exactly between 1 + eps and 1 + 2 eps: the latter when ties go to even."""
    least_increase_of_one: float
    """The smallest u for which 1 + u is not 1."""
    least_decrease_of_one: float
    """The smallest u for which 1 - u is not 1; the numbers below 1 lie twice as dense."""
    one_after_small_updates: float
    """SMALL_UPDATES times minus SMALL_UPDATE, starting from 1; exact would be 0.97."""
    overflows_from: float | None
    """The smallest number whose cast is not max; None where the cast saturates, and for fp64, which
    nothing wider is cast to."""
    cast_of_twice_max: float | None
    """None for fp64."""
    cast_of_infinity: float
    cast_of_small_gradient: float
    """SMALL_GRADIENT cast to the format."""
    small_gradient_with_scale: float
    """SMALL_GRADIENT times GRAD_SCALE cast to the format, then divided by GRAD_SCALE in fp64."""
    first_lost_integer: int
    """2 ** (mantissa bits + 1) + 1: the first whole number that the format does not hold."""
    first_lost_integer_becomes: float


def measure_rounding(number_format: NumberFormat, device: torch.device) -> Rounding | None:
    """How the device rounds to this format; None where it cannot cast to it and back."""
    dtype = number_format.dtype
    if dtype is None:
        return None

    def stored(value: float) -> float:
        return torch.tensor(value, dtype=torch.float64, device=device).to(dtype).to(torch.float64).item()

    def added_natively(left: float, right: float) -> float:
        terms = torch.tensor([left, right], dtype=torch.float64, device=device).to(dtype)
        return (terms[0] + terms[1]).to(torch.float64).item()

    def added_in_fp32(left: float, right: float) -> float:
        terms = torch.tensor([left, right], dtype=torch.float32, device=device)
        return (terms[0] + terms[1]).to(dtype).to(torch.float64).item()

    def in_fp32(value: float) -> float:
        return torch.tensor(value, dtype=torch.float32).item()

    try:
        stored(1.0)
    except (RuntimeError, TypeError):
        return None
    try:
        native = added_natively(1.0, 1.0) == 2.0
    except RuntimeError:
        native = False
    plus = added_natively if native else added_in_fp32
    addend = stored if native else in_fp32

    eps = float(number_format.eps)
    weight = 1.0
    for _ in range(SMALL_UPDATES):
        weight = plus(weight, -SMALL_UPDATE)
    first_lost_integer = 2 ** (number_format.mantissa_bits + 1) + 1
    largest = float(number_format.max)
    widest = dtype == torch.float64
    # Narrow types are cast from fp32, whatever they are given.
    source, highest = (in_fp32, float(FP32.max)) if number_format.bits < 32 else (float, float("inf"))
    overflows = not widest and stored(2 * largest) != largest
    return Rounding(
        arithmetic="in the format" if native else "fp32, then cast",
        one_plus_half_eps=plus(1.0, eps / 2),
        one_plus_three_half_eps=plus(1.0, 1.5 * eps),
        least_increase_of_one=_smallest(lambda u: plus(1.0, u) != 1.0, addend, high=2 * eps),
        least_decrease_of_one=_smallest(lambda u: plus(1.0, -u) != 1.0, addend, high=2 * eps),
        one_after_small_updates=weight,
        overflows_from=(
            _smallest(lambda x: stored(x) != largest, source, low=largest, high=min(2 * largest, highest))
            if overflows
            else None
        ),
        cast_of_twice_max=None if widest else stored(2 * largest),
        cast_of_infinity=stored(float("inf")),
        cast_of_small_gradient=stored(SMALL_GRADIENT),
        small_gradient_with_scale=stored(SMALL_GRADIENT * GRAD_SCALE) / GRAD_SCALE,
        first_lost_integer=first_lost_integer,
        first_lost_integer_becomes=stored(float(first_lost_integer)),
    )


def _smallest(
    holds: Callable[[float], bool], representable: Callable[[float], float], *, high: float, low: float = 0.0
) -> float:
    """The least representable number for which `holds`, which holds for `high` and not for `low`."""
    for _ in range(64):
        middle = representable((low + high) / 2)
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _power_of_two(exponent: int) -> Fraction:
    return Fraction(2) ** exponent
