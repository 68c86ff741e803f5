"""The command as a user runs it, with a tiny time budget."""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import precision
from stages.measure.number_formats import NUMBER_FORMATS
from stages.tracking.sync import sync


def strict_json(path: Path) -> Any:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.fixture(scope="module", autouse=True)
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the lab's MLflow run goes."""
    folder = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_ROOT", str(folder))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("lab") / "results" / "precision.json"
    assert precision.main(["--device", "cpu", "--seconds", "0.001", "--output", str(path)]) == 0
    assert [p.name for p in path.parent.iterdir()] == ["precision.json"]
    return strict_json(path)


def test_the_file_names_device_and_torch(report: Any) -> None:
    assert report["device"]["kind"] == "cpu"
    assert report["device"]["name"]
    assert report["torch"] == torch.__version__


def test_the_run_is_tracked_with_file_and_speeds(report: Any, root: Path) -> None:
    assert all(result.is_complete for result in sync(root / ".work"))
    with sqlite3.connect(root / "mlflow.db") as database:
        metrics = dict(database.execute("select key, value from latest_metrics"))
    by_name = {row["name"]: row for row in report["formats"]}
    assert metrics["matmul_tflops.bf16"] == by_name["bf16"]["matmul"]["tflops_per_second"]
    assert list((root / "mlartifacts").rglob("precision.json"))


def test_the_file_has_every_format_in_order(report: Any) -> None:
    assert [row["name"] for row in report["formats"]] == [f.name for f in NUMBER_FORMATS]
    by_name = {row["name"]: row for row in report["formats"]}
    assert by_name["fp16"]["max"] == 65504
    assert by_name["fp8 e4m3"]["max"] == 448
    assert by_name["e8m0"]["smallest_subnormal"] is None
    assert by_name["tf32"]["bits"] == 19
    assert by_name["tf32"]["storage_bits"] == 32
    assert by_name["fp64"]["smallest_subnormal"] == 5e-324


def test_the_file_holds_what_was_measured(report: Any) -> None:
    by_name = {row["name"]: row for row in report["formats"]}
    assert by_name["bf16"]["support"]["matmul"] == "yes"
    assert by_name["bf16"]["matmul"]["tflops_per_second"] > 0
    assert by_name["bf16"]["matmul"]["source"].startswith("measured ")
    assert by_name["fp6 e2m3"]["matmul"] is None
    assert by_name["fp6 e2m3"]["rounding"] is None
    assert by_name["fp16"]["rounding"]["cast_of_infinity"] == "inf"
    assert by_name["fp8 e4m3"]["rounding"]["cast_of_infinity"] == 448
    assert by_name["e8m0"]["rounding"]["cast_of_infinity"] == "nan"


def test_what_is_printed_fits_120_columns_and_explains_its_letters(
    report: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    precision.print_report(report)
    printed = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 120
    assert "…" not in printed, "a cell or a header is cut off"
    for number_format in NUMBER_FORMATS:
        assert f" {number_format.name} " in printed
    assert report["device"]["name"] in printed
    support = printed.split("What this device does")[1].split("How it rounds")[0]
    table, notes = support.split("A letter says why not:")
    used = {
        word for line in table.splitlines()[4:] for word in line.split() if len(word) == 1 and word.isalpha()
    }
    explained = {line.split()[0] for line in notes.splitlines() if line.startswith(" ") and line[1] != " "}
    assert used == explained
    assert '"add_stub" not implemented for this type' in notes


def test_an_old_result_stays_whole_when_the_new_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "precision.json"
    precision.write_report({"old": 1}, path)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(precision.PrecisionLabError, match="No space left on device"):
        precision.write_report({"new": 1}, path)
    assert strict_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["precision.json"]


def run_command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "stages.precision", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_an_unwritable_output_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = run_command(
        "--device", "cpu", "--seconds", "0.001", "--output", str(tmp_path / "file" / "out.json")
    )
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1
    assert answer.stderr.startswith("--output: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_one_sentence(tmp_path: Path) -> None:
    answer = run_command("--device", "cuda", "--output", str(tmp_path / "precision.json"))
    assert answer.returncode == 1
    assert "cuda was asked for" in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert not (tmp_path / "precision.json").exists()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_senseless_budget_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        precision.main(["--seconds", seconds])
    assert stopped.value.code == 2
    assert "--seconds" in capsys.readouterr().err


def test_the_documentation_shows_the_limits_that_the_lab_prints(
    report: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    precision.print_report(report)
    printed = capsys.readouterr().out.split("What this device does")[0]
    documentation = (Path(__file__).parents[1] / "docs" / "precision.md").read_text(encoding="utf-8")
    assert "\n".join(line.rstrip() for line in printed.splitlines()).strip() in documentation
