import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.measure.units import UnitError, parse_bytes, readable_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12GiB", 12 * 2**30), ("12 GiB", 12 * 2**30), (" 1.5gib ", 3 * 2**29), ("12GB", 12 * 10**9),
        ("800 MiB", 800 * 2**20), ("800mb", 800 * 10**6), (".5KiB", 512), ("7B", 7), ("2.TiB", 2 * 2**40),
    ],
)  # fmt: skip
def test_amounts(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "12", "GiB", "12 Gb/s", "-1GiB", "1e3MiB", "12GiB12", "1,5 GiB", "nanGiB"]
)
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(UnitError, match=r"is no amount of memory; write a number and GiB"):
        parse_bytes(text)


def test_nothing_is_refused() -> None:
    with pytest.raises(UnitError, match="above 0"):
        parse_bytes("0GiB")
    with pytest.raises(UnitError, match="above 0"):
        parse_bytes("0.1B")


@given(st.integers(1, 2**50))
def test_reads_what_is_printed(count: int) -> None:
    printed = readable_bytes(count)
    if printed != "0.0 MiB":
        assert parse_bytes(printed) == pytest.approx(count, abs=0.051 * 2**20, rel=0.006)
