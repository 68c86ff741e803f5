"""The rows as tables: cells once, then Markdown for the report and rich for the terminal."""

from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

from stages.params import VariantParams
from stages.report import units
from stages.report.rows import Comparison, Row


@dataclass(frozen=True)
class Cells:
    """A table as text; `variant` comes first, aligned left; numbers are aligned right."""

    header: tuple[str, ...]
    body: tuple[tuple[str, ...], ...]


def results_cells(comparison: Comparison) -> Cells:
    """What each variant cost and brought. A device column is added where there is more than one."""
    several_devices = len(comparison.devices) > 1
    any_mfu = any(row.mfu is not None for row in comparison.rows)
    header = [
        "variant",
        *["device"] * several_devices,
        "bits/byte",
        "Δ ± 95 %",
        "tokens/s",
        "speed",
        "peak memory",
        "saved",
        "predicted",
        "error",
    ]
    header += ["MFU"] * any_mfu
    body = []
    for row in comparison.rows:
        first = row is comparison.reference
        cells = [
            row.variant,
            *[row.device] * several_devices,
            f"{row.validation_bits_per_byte:.4f}",
            "reference" if first else difference(row),
            units.rate(row.tokens_per_second),
            units.ratio(row.speedup),
            units.memory(row.peak_memory_bytes),
            units.NONE if first else units.percent(row.memory_saved),
            units.memory(row.predicted_peak_memory_bytes),
            units.NONE if row.prediction_error is None else units.signed_percent(row.prediction_error),
        ]
        cells += [units.percent(row.mfu)] * any_mfu
        body.append(tuple(cells))
    return Cells(tuple(header), tuple(body))


def recipe_cells(comparison: Comparison) -> Cells:
    """What each variant is."""
    header = (
        *("variant", "precision", "recompute", "compile", "loss", "optimizer", "batch"),
        *("compiling took", "skipped steps"),
    )
    body = tuple(
        (
            row.variant,
            row.precision,
            row.recompute.replace("_", " "),
            row.compile,
            comparison.recipes[row.variant].loss,
            _optimizer_words(comparison.recipes[row.variant]),
            f"{row.accumulation_steps} × {row.micro_batch_size}",
            units.duration(row.compile_seconds) if row.compile_seconds else units.NONE,
            str(row.skipped_steps),
        )
        for row in comparison.rows
    )
    return Cells(header, body)


def _optimizer_words(recipe: VariantParams) -> str:
    name = recipe.optimizer.replace("_", " ")
    return f"{name} in backward" if recipe.optimizer_in_backward else name


def difference(row: Row) -> str:
    """`+0.0012 ±0.0033`: the wider half of the interval, which need not be symmetric."""
    text = units.signed(row.delta_bits_per_byte)
    if row.delta_ci95 is None:
        return text
    low, high = row.delta_ci95
    half = max(high - row.delta_bits_per_byte, row.delta_bits_per_byte - low)
    return f"{text} ±{half:.4f}"


def markdown_table(cells: Cells) -> str:
    """GitHub's Markdown, padded so that the source is readable too."""
    columns = list(zip(cells.header, *cells.body, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]

    def line(row: tuple[str, ...]) -> str:
        first, *others = row
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = [f":{'-' * (widths[0] + 1)}", *(f"{'-' * (width + 1)}:" for width in widths[1:])]
    return "\n".join([line(cells.header), f"|{'|'.join(rule)}|", *map(line, cells.body)])


def terminal_table(comparison: Comparison, width: int) -> Table:
    """The results for a terminal; itself Markdown, so that it can be copied into an issue.

    The best number of a column is bold, unless its rows are of several devices. Where `width`
    characters are too few, MFU and then the prediction and its error are left to the report.
    """
    cells = results_cells(comparison)
    for spare in ("MFU", "predicted", "error"):
        if _width(cells) > width:
            cells = _without(cells, spare)
    table = Table(box=box.MARKDOWN, header_style="bold")
    for name in cells.header:
        justify: Literal["left", "right"] = "left" if name in ("variant", "device") else "right"
        table.add_column(name, justify=justify, no_wrap=name == "variant")
    best = _best(comparison)
    for place, body_row in enumerate(cells.body):
        table.add_row(
            *(
                Text(cell, style="bold green" if best.get(name) == place else "")
                for name, cell in zip(cells.header, body_row, strict=True)
            )
        )
    return table


def _width(cells: Cells) -> int:
    """Characters of one line of the Markdown table."""
    columns = zip(cells.header, *cells.body, strict=True)
    return 1 + sum(3 + max(len(cell) for cell in column) for column in columns)


def _without(cells: Cells, name: str) -> Cells:
    kept = [place for place, header in enumerate(cells.header) if header != name]
    header, *body = [tuple(row[place] for place in kept) for row in (cells.header, *cells.body)]
    return Cells(header, tuple(body))


def _best(comparison: Comparison) -> dict[str, int]:
    """Column -> number of the row with its best value."""
    rows = comparison.rows
    if len(comparison.devices) > 1 or len(rows) < 2:
        return {}
    places = range(len(rows))
    return {
        "bits/byte": min(places, key=lambda place: rows[place].validation_bits_per_byte),
        "tokens/s": max(places, key=lambda place: rows[place].tokens_per_second),
        "peak memory": min(places, key=lambda place: rows[place].peak_memory_bytes),
    }
