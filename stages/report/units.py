"""Numbers as a person reads them."""

MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"
"""Stands where there is no number."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def binary_unit(largest_bytes: float) -> tuple[str, int]:
    """The unit in which a column or axis up to `largest_bytes` reads well, and its bytes."""
    power = 0
    while largest_bytes >= 1000 * 1024**power and power < len(_BINARY_UNITS) - 1:
        power += 1
    return _BINARY_UNITS[power], 1024**power


def memory(count: float) -> str:
    """Bytes with three significant digits: `312 MiB`, `1.53 GiB`."""
    unit, size = binary_unit(count)
    return f"{_three_digits(count / size)} {unit}"


def rate(per_second: float) -> str:
    """A number per second with three significant digits: `812`, `12.3 k`, `1.20 M`."""
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if per_second >= size:
            return f"{_three_digits(per_second / size)}{unit}"
    return _three_digits(per_second)


def ratio(value: float | None) -> str:
    """`1.35×`."""
    return NONE if value is None else f"{value:.2f}×"


def percent(fraction: float | None) -> str:
    """`42 %`, `3.1 %` below ten."""
    if fraction is None:
        return NONE
    value = 100 * fraction
    return f"{value:.{0 if abs(value) >= 9.95 else 1}f} %".replace("-", MINUS)


def signed_percent(fraction: float) -> str:
    """`+4.2 %`, `−0.01 %`: two digits that count, so that a small error does not read as none."""
    value = 100 * fraction
    digits = 2 if abs(value) < 0.095 else 1 if abs(value) < 9.95 else 0
    return f"{signed(value, digits)} %"


def signed(value: float, digits: int = 4) -> str:
    """`+0.0012`, `−0.0030`; always with a sign, except for a zero."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", MINUS)


def duration(seconds: float) -> str:
    """`9.4 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(number: float) -> str:
    """`1.00 M`, `65.5 k`, `812`: tokens and parameters."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{_three_digits(number / size)}{unit}"
    return f"{number:.0f}"


def text_size(number: float) -> str:
    """Bytes of text, in powers of 1,000 as disks and corpora are: `1.23 MB`, `812 B`."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{_three_digits(number / size)} {unit}"
    return f"{number:.0f} B"


def _three_digits(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"
