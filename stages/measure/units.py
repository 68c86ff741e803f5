"""Figures for a person to read."""


def readable_bytes(count: float) -> str:
    """`1610612736` as "1.50 GiB"; below a GiB in MiB with one decimal."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
