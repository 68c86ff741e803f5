import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages import compare
from stages.report.figures import FIGURES
from tests.report.variant_results import write_results


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_results(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _outs() -> dict[str, bytes]:
    paths = [
        compare.ROWS,
        compare.MARKDOWN,
        compare.HTML,
        *(compare.FIGURES / f"{name}.png" for name in FIGURES),
    ]
    return {str(path): path.read_bytes() for path in paths}


def test_writes_every_out_and_prints_the_table(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main() == 0
    rows = json.loads(compare.ROWS.read_text())
    assert [row["variant"] for row in rows] == [
        "baseline",
        "amp_checkpointing",
        "compiled_accumulated",
        "frugal",
    ]
    assert rows[0]["delta_ci95"] == [0.0, 0.0]
    printed = capsys.readouterr().out
    assert "results/report.html" in printed
    assert "| frugal " in printed
    page = compare.MARKDOWN.read_text()
    for name in FIGURES:
        assert f"(figures/{name}.png)" in page
    assert list(results.rglob(".*")) == []


def test_same_inputs_give_the_same_bytes(results: Path) -> None:
    assert compare.main() == 0
    before = _outs()
    assert compare.main() == 0
    assert _outs() == before


def test_outs_are_replaced_and_never_rewritten(results: Path) -> None:
    # Outs may be hard links into DVC's cache: writing through one would corrupt the cache.
    compare.ROWS.write_text("an older result")
    os.link(compare.ROWS, "cached")
    assert compare.main() == 0
    assert Path("cached").read_text() == "an older result"
    assert json.loads(compare.ROWS.read_text())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("params.yaml", "no such file"),
        ("results/evaluate/frugal.json", "run `dvc repro evaluate@frugal`"),
    ],
)
def test_errors_are_one_sentence_and_nothing_is_written(
    results: Path, capsys: pytest.CaptureFixture[str], path: str, message: str
) -> None:
    Path(path).unlink()
    assert compare.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("compare: ")
    assert message in error
    assert "Traceback" not in error
    assert not compare.ROWS.exists()


def test_unwritable_place_is_named(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("results/figures").write_text("a file where the folder should be")
    assert compare.main() == 1
    assert "results/figures" in capsys.readouterr().err


def test_as_a_module(results: Path) -> None:
    root = Path(compare.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    ran = subprocess.run(
        [sys.executable, "-m", "stages.compare"], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert max(len(line.rstrip()) for line in ran.stdout.splitlines()) <= 120
