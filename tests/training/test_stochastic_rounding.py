"""Unbiased, exact where nothing has to be rounded, and safe with what is not a number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.training.stochastic_rounding import stochastic_round

BF16 = torch.bfloat16


def bits(*patterns: int) -> torch.Tensor:
    signed = [p - 2**32 if p >= 2**31 else p for p in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("value", [1.001, -1.001, 0.9999, 3.1e-5, -7.77e30, 1e-39, 12345.678])
def test_the_two_neighbours_in_the_right_shares(value: float) -> None:
    torch.manual_seed(0)
    n = 200_000
    exact = float(torch.tensor(value))
    rounded = stochastic_round(torch.full((n,), value)).double()
    found = sorted(rounded.unique().tolist())
    assert len(found) == 2, "both neighbours, and only they"
    low, high = found
    assert low < exact < high
    share = float((rounded == high).double().mean())
    expected = (exact - low) / (high - low)
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / n)


@given(st.integers(0, 2**16 - 1))
def test_what_bfloat16_holds_is_not_changed(pattern: int) -> None:
    values = bits(pattern << 16)
    rounded = stochastic_round(values)
    assert torch.equal(rounded, values.to(BF16)) or bool(values.isnan() & rounded.isnan())


@given(st.integers(0, 2**32 - 1))
def test_never_further_than_the_next_number(pattern: int) -> None:
    values = bits(pattern)
    rounded = stochastic_round(values)
    if values.isnan():
        assert rounded.isnan()
        return
    neighbours = bits(pattern & 0xFFFF0000, (pattern & 0xFFFF0000) + (0 if pattern % 2**16 == 0 else 2**16))
    assert rounded.float().item() in neighbours.tolist()


def test_infinity_and_nan_stay(tries: int = 50) -> None:
    # The NaN's are those that adding and cutting bits would turn into infinity and -0.
    values = torch.cat([torch.tensor([math.inf, -math.inf]), bits(0x7F800001, 0xFF800001, 0x7FFFFFFF)])
    for _ in range(tries):
        rounded = stochastic_round(values)
        assert rounded[:2].tolist() == [math.inf, -math.inf]
        assert rounded[2:].isnan().all()


def test_small_updates_vanish_to_the_nearest_and_not_stochastically() -> None:
    torch.manual_seed(0)
    nearest = torch.ones(10_000, dtype=BF16)
    stochastic = torch.ones(10_000, dtype=BF16)
    for _ in range(300):
        nearest -= 1e-4
        stochastic = stochastic_round(stochastic.float() - 1e-4)
    assert (nearest == 1.0).all()
    assert float(stochastic.double().mean()) == pytest.approx(0.97, abs=2e-4)


def test_the_bits_come_from_the_default_generator() -> None:
    values = torch.randn(1000)
    torch.manual_seed(3)
    first, second = stochastic_round(values), stochastic_round(values)
    torch.manual_seed(3)
    assert torch.equal(stochastic_round(values), first)
    assert not torch.equal(first, second)
