"""`dvc repro`: everything the first time, then only what a change concerns."""

import json
import os
import signal
import subprocess
import time
from typing import Any

import pytest

from stages.report.rows import Row
from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow

VARIANTS = ("baseline", "amp_checkpointing", "compiled_accumulated", "frugal")
PARTS = ("plan", "train", "evaluate")
CONTRACT = [
    "variant",
    "precision",
    "recompute",
    "compile",
    "micro_batch_size",
    "accumulation_steps",
    "tokens",
    "validation_bits_per_byte",
    "delta_bits_per_byte",
    "delta_ci95",
    "tokens_per_second",
    "speedup",
    "peak_memory_bytes",
    "peak_memory_kind",
    "memory_saved",
    "predicted_peak_memory_bytes",
    "prediction_error",
    "mfu",
    "compile_seconds",
    "skipped_steps",
    "device",
    "seed",
]


def _stages_of(variant: str) -> set[str]:
    return {f"{part}@{variant}" for part in PARTS}


def _rows(repository: Repository) -> list[dict[str, Any]]:
    return json.loads((repository.root / "results/compare.json").read_text())


def test_every_out_is_there(finished: Repository) -> None:
    outs = finished.all_outs()
    assert {f"models/{variant}" for variant in VARIANTS} <= set(outs)
    for out in [*outs, "results/figures/loss_by_tokens.png", "results/report.md", "results/report.html"]:
        path = finished.root / out
        assert any(path.iterdir()) if path.is_dir() else path.stat().st_size, out
    half = [path for path in finished.root.rglob("*.part") if ".dvc" not in path.parts]
    assert not half


def test_the_comparison_keeps_its_contract(finished: Repository) -> None:
    rows = _rows(finished)
    assert [row["variant"] for row in rows] == list(VARIANTS)
    assert all(list(row) == CONTRACT for row in rows)
    assert list(Row.model_fields) == CONTRACT
    assert {row["tokens"] for row in rows} == {32 * 4 * 6}
    assert [row["accumulation_steps"] for row in rows] == [1, 1, 2, 2]
    assert all(row["peak_memory_kind"].startswith("cpu") for row in rows)
    assert rows[0]["delta_ci95"] == [0.0, 0.0]
    # The same weights on the same data: techniques change the loss by rounding alone.
    assert max(abs(row["delta_bits_per_byte"]) for row in rows) < 0.05


def test_outs_are_not_in_git(finished: Repository) -> None:
    assert not finished.run("git", "status", "--porcelain").stdout
    tracked = finished.run("git", "ls-files").stdout.split()
    assert not [name for name in tracked if name.startswith(("models", "results", "data", "mlflow"))]


def test_again_runs_nothing(finished: Repository) -> None:
    # Holds only while .dvcignore leaves out the bytecode that Python writes beside the sources.
    assert list((finished.root / "stages").rglob("__pycache__"))
    assert finished.repro() == set()
    assert "up to date" in finished.dvc("status")


def test_an_edited_variant_alone_runs_again(copy: Repository) -> None:
    copy.edit_params(lambda params: params["variants"]["baseline"].update(micro_batch_size=2))
    assert copy.repro() == _stages_of("baseline") | {"compare"}
    assert [row["accumulation_steps"] for row in _rows(copy)] == [2, 1, 2, 2]


def test_a_new_variant_needs_an_entry_and_nothing_else(copy: Repository) -> None:
    new = {"precision": "fp32", "recompute": "every_block", "micro_batch_size": 1}
    copy.edit_params(lambda params: params["variants"].update(tiny_batches=new))
    assert copy.repro() == _stages_of("tiny_batches") | {"compare"}
    assert [row["variant"] for row in _rows(copy)] == [*VARIANTS, "tiny_batches"]


def test_a_removed_variant_leaves_the_comparison(finished_baseline: Repository) -> None:
    assert (finished_baseline.root / "results/evaluate/frugal.json").exists()
    assert [row["variant"] for row in _rows(finished_baseline)] == ["baseline"]
    assert "frugal" not in (finished_baseline.root / "results/report.md").read_text()


def test_another_report_trains_nothing(copy: Repository) -> None:
    with (copy.root / "stages/report/units.py").open("a") as file:
        file.write("# another report\n")
    assert copy.repro() == {"compare"}


def test_the_same_params_give_the_same_bytes(baseline_only: Repository) -> None:
    """`--force` runs tokenize, plan and train again, although nothing has changed."""
    before = baseline_only.out_hashes("train@baseline")
    tokens = baseline_only.out_hashes("tokenize")
    assert baseline_only.repro("--force", "train@baseline") == {"tokenize", "plan@baseline", "train@baseline"}
    after = baseline_only.out_hashes("train@baseline")
    results = ("models/baseline", "results/curves/baseline.csv")
    assert [after[out] for out in results] == [before[out] for out in results]
    assert baseline_only.out_hashes("tokenize") == tokens
    # Seconds are never twice the same; that they alone differ is why evaluate does not run.
    assert after["results/measurements/baseline.json"] != before["results/measurements/baseline.json"]
    assert baseline_only.repro() == {"compare"}


def test_an_interrupted_training_leaves_no_half_out(baseline_only: Repository) -> None:
    steps = 1000
    baseline_only.edit_params(lambda params: params["training"].update(token_budget=32 * 4 * steps))
    journals = baseline_only.root / ".work/tracking"
    before = set(journals.iterdir())
    process = subprocess.Popen(
        ("dvc", "repro"),
        cwd=baseline_only.root,
        env=baseline_only.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None and set(journals.iterdir()) == before:
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) != 0
    root = baseline_only.root
    assert not (root / "models/baseline").exists()
    assert not (root / "results/curves/baseline.csv").exists()
    assert not (root / "results/measurements/baseline.json").exists()
    assert baseline_only.repro() == {"train@baseline", "evaluate@baseline", "compare"}
    assert json.loads((root / "models/baseline/training.json").read_text())["steps"] == steps
