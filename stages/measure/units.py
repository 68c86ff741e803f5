"""Figures for a person to read, and those that a person writes."""

import re

_BYTES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_UNITS = {unit.lower(): size for unit, size in _BYTES.items()}


class UnitError(ValueError):
    """An amount that cannot be read; the message says what can."""


def readable_bytes(count: float) -> str:
    """`1610612736` as "1.50 GiB"; below a GiB in MiB with one decimal."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def parse_bytes(text: str) -> int:
    """`12GiB`, `1.5 GiB`, `800 MiB`, `12GB` (10^9) as bytes; units in any case.

    Raises:
        UnitError: no number, no unit, an unknown unit, or nothing.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise UnitError(
            f"{text!r} is no amount of memory; write a number and GiB, MiB, GB or MB, such as 12GiB"
        )
    count = int(float(found[1]) * unit)
    if count <= 0:
        raise UnitError(f"{text!r} is no memory at all; write an amount above 0, such as 12GiB")
    return count
