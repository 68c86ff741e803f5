"""Codes and scales: how near, how many bytes, what must come back exactly."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.training.blockwise_quantization import BLOCK, block_count, dequantize, dynamic_table, quantize

SIGNED = pytest.mark.parametrize("signed", [True, False])


def values_like(rows: int, columns: int, signed: bool, seed: int = 0) -> torch.Tensor:
    """Magnitudes over five decades."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 10 ** (-5 * torch.rand(rows, columns, generator=generator))
    return magnitudes * torch.randn(rows, columns, generator=generator).sign() if signed else magnitudes


@SIGNED
@pytest.mark.parametrize("columns", [1, 7, 255, 256, 257, 600])
def test_shapes_and_error(signed: bool, columns: int) -> None:
    values = values_like(9, columns, signed)
    codes, scales = quantize(values, signed)
    assert (codes.shape, codes.dtype) == ((9, columns), torch.uint8)
    assert (scales.shape, scales.dtype) == ((9, block_count(columns)), torch.float32)
    found = dequantize(codes, scales, signed)
    assert found.shape == values.shape
    scale = scales[:, torch.arange(columns) // BLOCK]
    # Half the table's widest gap: from 1 to the last part but one of the highest decade, or one part.
    gap = 1.5 * 0.9 / 64 if signed else 0.9 / 128
    assert ((found - values).abs() / scale).max() <= gap / 2 + 1e-6


@SIGNED
def test_the_nearest_entry_is_taken(signed: bool) -> None:
    values = values_like(4, 256, signed)
    codes, scales = quantize(values, signed)
    distances = (values.unsqueeze(-1) / scales.unsqueeze(-1) - dynamic_table(signed)).abs()
    taken = distances.gather(-1, codes.long().unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(taken, distances.amin(-1), atol=1e-7)


@SIGNED
@settings(max_examples=200, deadline=None)
@given(entry=st.integers(0, 253), offset=st.integers(-2, 2))
def test_the_nearest_entry_beside_every_boundary(signed: bool, entry: int, offset: int) -> None:
    table = dynamic_table(signed)
    boundary = (table[entry] + table[entry + 1]) / 2
    value = (boundary.view(torch.int32) + offset).view(torch.float32)
    codes, _ = quantize(torch.stack([value, torch.tensor(1.0)])[None], signed)
    code = int(codes[0, 0])
    distances = (table.double() - value.double()).abs()
    assert float(distances[code]) <= float(distances.min()) + 3e-7 * abs(float(value))


@SIGNED
def test_quantized_again_it_is_the_same(signed: bool) -> None:
    """Or moments would drift by being read and written."""
    codes, scales = quantize(values_like(5, 600, signed), signed)
    codes_again, scales_again = quantize(dequantize(codes, scales, signed), signed)
    assert torch.equal(codes_again, codes)
    assert torch.equal(scales_again, scales)


@SIGNED
def test_the_largest_of_a_block_is_exact(signed: bool) -> None:
    values = values_like(8, 256, signed)
    found = dequantize(*quantize(values, signed), signed)
    where = values.abs().argmax(1, keepdim=True)
    assert torch.equal(found.gather(1, where), values.gather(1, where))


@SIGNED
def test_zeros_come_back_as_zeros(signed: bool) -> None:
    assert not dequantize(*quantize(torch.zeros(3, 300), signed), signed).any()


def test_a_second_moment_is_never_rounded_to_zero() -> None:
    values = torch.tensor([[1.0, 1e-20]])
    assert (dequantize(*quantize(values, signed=False), signed=False) > 0).all()


def test_an_outlier_spoils_its_own_block_alone() -> None:
    values = values_like(2, 512, signed=True)
    with_outlier = values.clone()
    with_outlier[0, 3] = 1e9
    clean, spoiled = (dequantize(*quantize(v, True), True) for v in (values, with_outlier))
    assert torch.equal(clean[0, 256:], spoiled[0, 256:])
    assert torch.equal(clean[1], spoiled[1])
    assert not torch.equal(clean[0, 4:256], spoiled[0, 4:256])


@SIGNED
def test_tables(signed: bool) -> None:
    table = dynamic_table(signed)
    assert len(table) == 255
    assert (table.diff() > 0).all()
    assert table[-1] == 1
    if signed:
        assert torch.equal(table, -table.flip(0))
    assert (table == 0).any() == signed
    assert float(table[table > 0].min()) == pytest.approx(5.5e-7 if signed else 3.25e-7)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.booleans(),
)
def test_any_finite_values(numbers: list[float], signed: bool) -> None:
    values = torch.tensor([numbers])
    values = values if signed else values.abs()
    found = dequantize(*quantize(values, signed), signed)
    assert found.isfinite().all()
    assert (found - values).abs().max() <= 0.011 * values.abs().max() + 1e-38


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    values = torch.ones(1, 256)
    values[0, 5] = bad
    assert dequantize(*quantize(values, True), True).isnan().any()
