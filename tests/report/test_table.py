import io
from pathlib import Path

import pytest
from rich.console import Console

from stages.report.rows import Comparison
from stages.report.table import Cells, difference, markdown_table, results_cells, terminal_table
from tests.report.variant_results import build, edit_json


def test_markdown_table() -> None:
    table = markdown_table(Cells(("variant", "n"), (("a", "1"), ("longer_name", "20"))))
    assert table.splitlines() == [
        "| variant     |  n |",
        "|:------------|---:|",
        "| a           |  1 |",
        "| longer_name | 20 |",
    ]


def test_cells(comparison: Comparison) -> None:
    cells = results_cells(comparison)
    assert cells.body[0] == (
        "baseline",
        f"{comparison.reference.validation_bits_per_byte:.4f}",
        "reference",
        "9.80 k",
        "1.00×",
        "612 MiB",
        "–",
        "604 MiB",
        "−1.3 %",
        "31 %",
    )
    assert cells.body[3][3:7] == ("14.7 k", "1.50×", "79.0 MiB", "87 %")


def test_predicted_stands_beside_measured_in_a_log(comparison: Comparison) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal_table(comparison, 120))
    text = console.export_text()
    for shown in ("predicted", "error", "604 MiB", "−6.3 %"):
        assert shown in text


def test_no_error_is_a_dash(comparison: Comparison) -> None:
    edit_json(Path("results/plan/frugal.json"), device="cuda")
    cells = results_cells(build())
    assert cells.body[3][cells.header.index("error")] == "–"


def test_difference_gives_the_wider_half(comparison: Comparison) -> None:
    row = comparison.rows[1].model_copy(
        update={"delta_bits_per_byte": -0.001, "delta_ci95": (-0.003, -0.0005)}
    )
    assert difference(row) == "−0.0010 ±0.0020"
    assert difference(row.model_copy(update={"delta_ci95": None})) == "−0.0010"


@pytest.mark.parametrize("width", [100, 110, 120])
def test_terminal_table_is_not_cut(comparison: Comparison, width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal_table(comparison, width))
    text = console.export_text()
    assert "…" not in text
    # A heading, a rule and one line per variant: nothing was folded.
    assert len([line for line in text.splitlines() if line.strip()]) == 6
    for cell in ("compiled_accumulated", "reference", "14.7 k", "79.0 MiB", "87 %"):
        assert cell in text


def test_devices_are_named_where_they_differ(comparison: Comparison) -> None:
    assert "device" not in results_cells(comparison).header
    edit_json(Path("results/measurements/frugal.json"), device={"kind": "cuda", "name": "NVIDIA H200"})
    cells = results_cells(build())
    assert cells.header[1] == "device"
    assert cells.body[3][1] == "NVIDIA H200"
    assert cells.body[3][5] == "–"
