from pathlib import Path

import pytest

from benchmarks.peer_figure import draw, write_figure
from benchmarks.peer_summary import Row
from benchmarks.peer_table import Conditions, result_name, write_page
from stages.report.style import LIGHT
from tests.benchmarks.peer_runs_made import PARAMETERS, STANDING, result, rows, runs

MIB = 2**20
PAGE = Conditions("AMD EPYC", "cpu", 2, 24 * 2**30, "2.13.0", "abc1234+", "2026-11-21", 3, 10, 0.25)


@pytest.fixture
def found() -> list[Row]:
    return rows(
        [
            runs("frugal", False, [result(1200), result(1300)]),
            runs("frugal", True, [result(1500, STANDING + 2 * MIB, switches=["loss: chunked"])] * 2),
            runs("trainer", False, [result(1000, STANDING + 8 * MIB), result(1000, STANDING + 10 * MIB)]),
            runs("litgpt", True, [], failure="pip could not | install it"),
            runs("tutorial", True, [result(1490, STANDING + 8 * MIB)] * 2, micro_batch_size=4),
        ]
    )


def page_of(found: list[Row], folder: Path) -> str:
    write_page(folder / "page.md", found, {"W": PARAMETERS}, {"transformers": "5.23.0"}, PAGE)
    return (folder / "page.md").read_text()


def line(page: str, begin: str) -> list[str]:
    [found] = [line for line in page.splitlines() if line.startswith(f"| {begin} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_row_has_median_and_extremes(found: list[Row], tmp_path: Path) -> None:
    cells = line(page_of(found, tmp_path), "amp | Trainer")
    assert cells[2:4] == ["1,000", "1.25× [1.20× to 1.30×]"]
    assert cells[5:8] == ["24 [23 to 25]", "9", "0.42×"]
    assert line(page_of(found, tmp_path), "amp | this project")[2] == "1,250 [1,200 to 1,300]"


def test_what_was_missed_stands_out(found: list[Row], tmp_path: Path) -> None:
    page = page_of(found, tmp_path)
    assert line(page, "technique | Trainer") == ["technique", "Trainer", "litgpt +", "tutorial loop +"]
    assert line(page, "amp | **1.25×**")[2:] == ["–", "1.01× ✗"]
    missed = line(page, "at least 1.05× the tokens/s of tutorial loop, with every switch on both sides")
    assert missed[1:] == ["0 of 1", "1.01× to 1.01×", "W amp 1.01×"]


def test_a_failure_and_a_smaller_micro_batch_are_in_the_table(found: list[Row], tmp_path: Path) -> None:
    page = page_of(found, tmp_path)
    assert line(page, "amp | litgpt +")[2] == "pip could not / install it"
    assert "| amp | tutorial loop + (micro-batch 4) |" in page


def test_the_page_names_what_it_holds_for(found: list[Row], tmp_path: Path) -> None:
    page = page_of(found, tmp_path)
    for words in (
        "AMD EPYC, 2 threads, 24 GiB",
        "torch 2.13.0, transformers 5.23.0",
        "on 2026-11-21, commit abc1234+",
        "![tokens/s and peak memory](amd-epyc-2-threads.png)",
        "1,000,000 parameters: 15 MiB must stand",
        "- this project: `loss: chunked`",
    ):
        assert words in page
    lengths = {len(row.split("|")) for row in page.splitlines() if row.startswith("| amp | ") and "[" in row}
    assert lengths == {12}


def test_files_are_named_after_the_device() -> None:
    assert result_name(PAGE) == "amd-epyc-2-threads"
    gpu = Conditions("NVIDIA H100 80GB HBM3", "cuda", 16, 80 * 2**30, "2.13.0", "x", "x", 3, 10, 0.0)
    assert result_name(gpu) == "nvidia-h100-80gb-hbm3"


def test_every_figure_is_a_point(found: list[Row], tmp_path: Path) -> None:
    figure = draw(found, {"W": PARAMETERS}, PAGE, LIGHT)
    speed, memory = figure.axes
    assert any("medians of 2 rounds" in text.get_text() for text in figure.texts)
    points = [line.get_xdata()[0] for line in speed.lines if line.get_marker() == "o"]
    assert sorted(points) == [1000, 1250, 1490, 1500]
    points = [line.get_xdata()[0] for line in memory.lines if line.get_marker() == "o"]
    assert min(points) * MIB == STANDING + 2 * MIB
    write_figure(tmp_path / "page.png", found, {"W": PARAMETERS}, PAGE)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_says_how_many_runs_its_medians_are_of(found: list[Row], tmp_path: Path) -> None:
    once = rows([runs("frugal", False, [result()])], technique="fp32")
    assert "\n1 round; 10 counted steps" in page_of(once, tmp_path)
    assert "\n2 rounds; 10" in page_of(found, tmp_path)
    assert "\n1 to 2 rounds (2 of W amp); 10" in page_of([*found, *once], tmp_path)
