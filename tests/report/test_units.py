import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.report import units


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00 B"), (900, "900 B"), (2**20, "1.00 MiB"), (612 * 2**20, "612 MiB"), (1001 * 2**20, "0.98 GiB"),
     (int(7.7 * 2**30), "7.70 GiB"), (64 * 2**30, "64.0 GiB")],
)  # fmt: skip
def test_memory(value: int, text: str) -> None:
    assert units.memory(value) == text


@given(st.integers(1, 2**49))
def test_memory_is_right_to_three_digits(value: int) -> None:
    number, unit = units.memory(value).split()
    size = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert float(number) * size == pytest.approx(value, rel=0.0055)


@pytest.mark.parametrize(
    ("value", "text"),
    [(812, "812 B"), (1_234, "1.23 kB"), (1_230_000, "1.23 MB"), (1.5e9, "1.50 GB"), (2e12, "2.00 TB")],
)
def test_text_size(value: float, text: str) -> None:
    assert units.text_size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(812.4, "812"), (9_800, "9.80 k"), (12_345, "12.3 k"), (1_200_000, "1.20 M")]
)
def test_rate(value: float, text: str) -> None:
    assert units.rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0012, "+0.0012"), (-0.003, "−0.0030"), (0.0, "0.0000"), (-0.00001, "0.0000")]
)
def test_signed(value: float, text: str) -> None:
    assert units.signed(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.4, "9.4 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


def test_percent() -> None:
    assert [units.percent(x) for x in (0.42, -0.42, 0.031, None)] == ["42 %", "−42 %", "3.1 %", "–"]


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.042, "+4.2 %"), (-0.0001, "−0.01 %"), (0.0, "0.00 %"), (0.1234, "+12 %"), (-0.0021, "−0.2 %")],
)
def test_signed_percent(fraction: float, text: str) -> None:
    assert units.signed_percent(fraction) == text
