"""The DVC commands that the README names: diffs, metrics, plots, experiments and their queue."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow


def _finished_experiments(repository: Repository) -> list[str]:
    references = repository.run("git", "for-each-ref", "--format=%(refname)", "refs/exps").stdout.split()
    return [name for name in references if re.fullmatch(r"refs/exps/[0-9a-f]{2}/[0-9a-f]{38}/.+", name)]


def test_dag_names_every_stage(finished: Repository) -> None:
    dag = finished.dvc("dag", "--dot")
    for stage in ("tokenize", "plan@baseline", "train@frugal", "evaluate@amp_checkpointing", "compare"):
        assert stage in dag


def test_metrics_show(finished: Repository) -> None:
    metrics = json.loads(finished.dvc("metrics", "show", "--json"))
    files = metrics[""]["data"]
    assert files["results/evaluate/frugal.json"]["data"]["bits_per_byte"] > 0
    assert files["results/measurements/frugal.json"]["data"]["tokens_per_second"] > 0


def test_plots_show(finished: Repository, tmp_path: Path) -> None:
    finished.dvc("plots", "show", "--out", str(tmp_path / "plots"))
    page = (tmp_path / "plots/index.html").read_text()
    assert "training loss by tokens" in page
    assert "loss_by_time.png" in page


def test_an_experiment_changes_a_param_and_is_compared(baseline_only: Repository) -> None:
    out = baseline_only.dvc("exp", "run", "--set-param", "training.learning_rate=0.002")
    assert "train@baseline" in out
    assert baseline_only.params()["training"]["learning_rate"] == 0.002
    params = json.loads(baseline_only.dvc("params", "diff", "--json"))
    change = params["params.yaml"]["training.learning_rate"]
    assert (change["old"], change["new"]) == (0.004, 0.002)
    metrics = json.loads(baseline_only.dvc("metrics", "diff", "--json"))
    assert metrics["results/evaluate/baseline.json"]["bits_per_byte"]["diff"] != 0


def test_queued_experiments_run_two_at_a_time(baseline_only: Repository) -> None:
    for rate in ("0.001", "0.008"):
        baseline_only.dvc("exp", "run", "--queue", "--set-param", f"training.learning_rate={rate}")
    baseline_only.dvc("queue", "start", "--jobs", "2")
    # `dvc queue status` asks the workers and waits for seconds; a finished experiment is a git reference.
    deadline = time.monotonic() + 150
    while len(_finished_experiments(baseline_only)) < 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert baseline_only.dvc("queue", "status").count("Success") == 2
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
