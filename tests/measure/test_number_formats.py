"""The limits against two independent oracles: every bit pattern decoded with exact fractions (here,
from the fields alone), and torch (`torch.finfo`, and the bits of its own tensors)."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.measure.number_formats import NUMBER_FORMATS, NumberFormat, limits

FORMATS = {f.name: f for f in NUMBER_FORMATS}
# name: (sign, exponent, mantissa, bias, has infinity, has NaN, exponent field 0 is special)
DEFINITIONS = {
    "fp64": (1, 11, 52, 1023, True, True, True),
    "fp32": (1, 8, 23, 127, True, True, True),
    "tf32": (1, 8, 10, 127, True, True, True),
    "bf16": (1, 8, 7, 127, True, True, True),
    "fp16": (1, 5, 10, 15, True, True, True),
    "fp8 e4m3": (1, 4, 3, 7, False, True, True),
    "fp8 e5m2": (1, 5, 2, 15, True, True, True),
    "e8m0": (0, 8, 0, 127, False, True, False),
    "fp6 e2m3": (1, 2, 3, 1, False, False, True),
    "fp6 e3m2": (1, 3, 2, 3, False, False, True),
    "fp4 e2m1": (1, 2, 1, 1, False, False, True),
}
INTEGER_OF_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def decode(name: str, pattern: int) -> Fraction | float:
    """The number that a bit pattern stands for; a float only for inf and NaN."""
    sign_bits, exponent_bits, mantissa_bits, bias, has_inf, has_nan, has_subnormals = DEFINITIONS[name]
    mantissa = pattern % 2**mantissa_bits
    exponent = (pattern >> mantissa_bits) % 2**exponent_bits
    negative = sign_bits and pattern >> (mantissa_bits + exponent_bits)
    sign = -1 if negative else 1
    top_exponent = exponent == 2**exponent_bits - 1
    if has_inf and top_exponent:
        return math.nan if mantissa else sign * math.inf
    if has_nan and not has_inf and top_exponent and mantissa == 2**mantissa_bits - 1:
        return math.nan
    if has_subnormals and exponent == 0:
        return sign * Fraction(mantissa, 2**mantissa_bits) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(mantissa, 2**mantissa_bits)) * Fraction(2) ** (exponent - bias)


def is_subnormal(name: str, pattern: int) -> bool:
    _, exponent_bits, mantissa_bits, *_, has_subnormals = DEFINITIONS[name]
    return has_subnormals and (pattern >> mantissa_bits) % 2**exponent_bits == 0


def same(left: Fraction | float, right: float) -> bool:
    return math.isnan(right) if isinstance(left, float) and math.isnan(left) else left == right


def test_the_table_has_every_format_of_the_lab() -> None:
    assert list(FORMATS) == list(DEFINITIONS)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_fields_and_specials(name: str) -> None:
    number_format = FORMATS[name]
    sign_bits, exponent_bits, mantissa_bits, bias, has_inf, has_nan, has_subnormals = DEFINITIONS[name]
    assert number_format.sign_bits == sign_bits
    assert number_format.exponent_bits == exponent_bits
    assert number_format.mantissa_bits == mantissa_bits
    assert number_format.bias == bias
    assert number_format.specials == ("inf and nan" if has_inf else "nan" if has_nan else "none")
    assert number_format.has_subnormals == has_subnormals
    assert number_format.bits == sign_bits + exponent_bits + mantissa_bits


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.bits <= 16])
def test_limits_against_every_bit_pattern(name: str) -> None:
    decoded = [decode(name, pattern) for pattern in range(2 ** FORMATS[name].bits)]
    finite = {pattern: value for pattern, value in enumerate(decoded) if isinstance(value, Fraction)}
    positive = {pattern: value for pattern, value in finite.items() if value > 0}
    subnormal = {pattern for pattern in positive if is_subnormal(name, pattern)}
    found = limits(FORMATS[name])
    assert found.max == max(finite.values())
    assert found.min == min(finite.values())
    assert found.smallest_normal == min(v for p, v in positive.items() if p not in subnormal)
    assert found.smallest_subnormal == min((positive[p] for p in subnormal), default=None)
    assert found.eps == min(v for v in positive.values() if v > 1) - 1


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.bits > 16])
def test_limits_against_the_bit_patterns_at_the_edges(name: str) -> None:
    """Too wide to enumerate: positive patterns are in the order of their values, so the edges tell."""
    number_format = FORMATS[name]
    exponent_bits, mantissa_bits, bias = DEFINITIONS[name][1:4]
    infinity = (2**exponent_bits - 1) << mantissa_bits
    one = bias << mantissa_bits
    found = limits(number_format)
    assert decode(name, infinity) == math.inf
    assert found.max == decode(name, infinity - 1)
    assert found.min == -found.max
    assert found.smallest_normal == decode(name, 1 << mantissa_bits)
    assert found.smallest_subnormal == decode(name, 1)
    assert decode(name, one) == 1
    assert found.eps == decode(name, one + 1) - 1


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_definition_agrees_with_finfo(name: str) -> None:
    """Both ways: where torch has the numbers they are used, and the definition gives the same."""
    number_format = FORMATS[name]
    found = limits(number_format)
    assert found.source == (
        "definition" if name in ("tf32", "fp6 e2m3", "fp6 e3m2", "fp4 e2m1") else "torch.finfo"
    )
    for field in ("max", "min", "smallest_normal", "smallest_subnormal", "eps"):
        assert getattr(found, field) == getattr(number_format, field), field
    if found.source == "torch.finfo":
        assert number_format.dtype is not None
        info = torch.finfo(number_format.dtype)
        assert (info.max, info.min, info.eps) == (number_format.max, number_format.min, number_format.eps)
        assert info.smallest_normal == number_format.smallest_normal
        assert info.bits == number_format.bits


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.dtype and f.bits in (8, 16)])
def test_every_bit_pattern_of_torch_is_the_number_of_the_definition(name: str) -> None:
    dtype, bits = FORMATS[name].dtype, FORMATS[name].bits
    assert dtype is not None
    integers = torch.arange(2**bits).to(INTEGER_OF_BITS[bits])
    # fp64, because on some machines fp32 subnormals are flushed on the way.
    decoded = integers.view(dtype).to(torch.float32).to(torch.float64).tolist()
    for pattern, value in enumerate(decoded):
        assert same(decode(name, pattern), value), f"{name} {pattern:#x}: torch has {value}"


@pytest.mark.parametrize(("name", "bits"), [("fp32", 32), ("fp64", 64)])
@given(data=st.data())
def test_wide_patterns_of_torch_are_the_numbers_of_the_definition(
    name: str, bits: int, data: st.DataObject
) -> None:
    pattern = data.draw(st.integers(0, 2**bits - 1))
    signed = pattern - 2**bits if pattern >= 2 ** (bits - 1) else pattern
    dtype = FORMATS[name].dtype
    assert dtype is not None
    value = torch.tensor([signed], dtype=INTEGER_OF_BITS[bits]).view(dtype).item()
    assert same(decode(name, pattern), value)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # OCP MX specification 1.0, tables of element data types; OFP8 1.0, table 1.
        ("fp8 e4m3", ("448", "1/64", "1/512")),
        ("fp8 e5m2", ("57344", "1/16384", "1/65536")),
        ("fp6 e2m3", ("15/2", "1", "1/8")),
        ("fp6 e3m2", ("28", "1/4", "1/16")),
        ("fp4 e2m1", ("6", "1", "1/2")),
    ],
)
def test_published_tables(name: str, published: tuple[str, str, str]) -> None:
    number_format: NumberFormat = FORMATS[name]
    found = (number_format.max, number_format.smallest_normal, number_format.smallest_subnormal)
    assert found == tuple(Fraction(text) for text in published)


def test_e8m0_is_every_power_of_two_and_nan() -> None:
    values = [decode("e8m0", p) for p in range(256)]
    assert values[:255] == [Fraction(2) ** (p - 127) for p in range(255)]
    assert math.isnan(values[255])
    assert FORMATS["e8m0"].min == Fraction(2) ** -127
