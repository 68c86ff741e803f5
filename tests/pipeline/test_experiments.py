"""The DVC commands that the README names: diffs, metrics, plots, experiments and their queue."""

import json
import time

import pytest

from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow


def test_dag_names_every_stage(finished: Repository) -> None:
    dag = finished.dvc("dag", "--dot")
    for stage in ("tokenize", "plan@baseline", "train@frugal", "evaluate@amp_checkpointing", "compare"):
        assert stage in dag


def test_metrics_show(finished: Repository) -> None:
    metrics = json.loads(finished.dvc("metrics", "show", "--json"))
    files = metrics[""]["data"]
    assert files["results/evaluate/frugal.json"]["data"]["bits_per_byte"] > 0
    assert files["results/measurements/frugal.json"]["data"]["tokens_per_second"] > 0


def test_plots_show(finished: Repository, tmp_path: object) -> None:
    finished.dvc("plots", "show", "--out", f"{tmp_path}/plots")
    page = (finished.root / f"{tmp_path}/plots/index.html").read_text()
    assert "training loss by tokens" in page
    assert "loss_by_time.png" in page


def test_an_experiment_changes_a_param_and_is_compared(baseline_only: Repository) -> None:
    out = baseline_only.dvc("exp", "run", "--set-param", "training.learning_rate=0.002")
    assert "train@baseline" in out
    assert baseline_only.params()["training"]["learning_rate"] == 0.002
    params = json.loads(baseline_only.dvc("params", "diff", "--json"))
    assert params["params.yaml"]["training.learning_rate"] == {"old": 0.004, "new": 0.002}
    metrics = json.loads(baseline_only.dvc("metrics", "diff", "--json"))
    assert metrics["results/evaluate/baseline.json"]["bits_per_byte"]["diff"] != 0


def test_queued_experiments_run_two_at_a_time(baseline_only: Repository) -> None:
    for rate in ("0.001", "0.008"):
        baseline_only.dvc("exp", "run", "--queue", "--set-param", f"training.learning_rate={rate}")
    baseline_only.dvc("queue", "start", "--jobs", "2")
    deadline = time.monotonic() + 150
    while (status := baseline_only.dvc("queue", "status")).count("Success") < 2:
        assert "Failed" not in status and time.monotonic() < deadline, status
        time.sleep(1)
    shown = json.loads(baseline_only.dvc("exp", "show", "--json"))
    experiments = [entry for commit in shown for entry in commit.get("experiments") or []]
    rates = {
        experiment["revs"][0]["data"]["params"]["params.yaml"]["data"]["training"]["learning_rate"]
        for experiment in experiments
    }
    assert rates == {0.001, 0.008}
    # The workspace is as it was: both ran in folders of their own.
    assert not baseline_only.run("git", "status", "--porcelain").stdout
    assert baseline_only.repro() == set()
