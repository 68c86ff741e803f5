"""SIGTERM and SIGINT to the stages themselves, wherever they are."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.faults.stage_process import StageProcess, checkpoints, results, train
from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)


@BOTH
def test_training_is_saved_and_goes_on_to_the_same_result(
    repository: Repository, uninterrupted: dict[str, str], number: signal.Signals
) -> None:
    process = StageProcess(repository, "train", "baseline")
    process.wait_for_checkpoint()
    process.send(number)
    ended = process.end()
    assert ended.status == 75, ended
    told, last = ended.errors()
    assert told == f"{number.name}: finishing the micro-batch and saving; again to stop at once"
    stopped = re.fullmatch(
        rf"train baseline: stopped by {number.name} after step (\d+) of 600, saved; `dvc repro` goes on from "
        "there",
        last,
    )
    assert stopped, ended
    assert f"step-{int(stopped[1]):09}" in checkpoints(repository.root, "baseline")
    assert not (repository.root / "models/baseline").exists()

    ended = train(repository, "baseline")
    assert ended.status == 0 and f"going on after step {stopped[1]} of 600" in ended.stdout, ended
    assert results(repository.root, "baseline") == uninterrupted


@BOTH
def test_compiling_ends_soon(repository: Repository, number: signal.Signals) -> None:
    """Nothing is there to be saved. The compiler is found at work by what it puts into its cache."""
    process = StageProcess(repository, "train", "compiled_accumulated")
    process.wait_for(".work/compile-cache/**/*.cpp")
    process.send(number)
    ended = process.end()
    assert ended.status == 75, ended
    (line,) = ended.errors()
    assert line.startswith(f"train compiled_accumulated: stopped by {number.name}"), ended
    assert checkpoints(repository.root, "compiled_accumulated") == []


@BOTH
def test_evaluating_ends_soon(trained: Repository, tmp_path: Path, number: signal.Signals) -> None:
    repository = trained.copy_to(tmp_path / "repository")
    repository.edit_params(lambda params: params["evaluation"]["samples"].update(max_new_tokens=1_000_000))
    process = StageProcess(repository, "evaluate", "baseline")
    process.wait_for("results/evaluate/baseline.documents.csv", after_seconds=0.1)
    process.send(number)
    ended = process.end()
    assert ended.status == 75, ended
    assert ended.errors() == [
        f"evaluate baseline: stopped by {number.name}; it is not complete; `dvc repro` runs it again"
    ]
    assert not (repository.root / "hugging_face/baseline").exists()


@BOTH
def test_a_second_signal_stops_at_once(repository: Repository, number: signal.Signals) -> None:
    """Steps of more than a second, so that the second signal finds the first one's at work."""

    def edit(params: dict[str, Any]) -> None:
        params["model"] |= {"hidden_size": 128, "intermediate_size": 4096, "num_hidden_layers": 3}
        params["training"] |= {"global_batch_size": 256, "token_budget": 32 * 256 * 40}
        params["checkpoints"] = {"every_steps": 1}
        params["variants"]["baseline"]["micro_batch_size"] = 256

    repository.edit_params(edit)
    process = StageProcess(repository, "train", "baseline")
    process.wait_for_checkpoint()
    before = checkpoints(repository.root, "baseline")
    process.send(number)
    time.sleep(0.5)
    process.send(number)
    ended = process.end()
    assert ended.status == 128 + number, ended
    assert ended.errors()[-1] == f"train baseline: {number.name} again, stopped at once"
    assert set(before) & set(checkpoints(repository.root, "baseline"))


def test_a_second_trainer_is_refused_and_the_first_goes_on(repository: Repository) -> None:
    repository.edit_params(lambda params: params["training"].update(token_budget=32 * 4 * 100_000))
    first = StageProcess(repository, "train", "baseline")
    first.wait_for_checkpoint()
    second = train(repository, "baseline")
    assert second.status == 1
    (line,) = second.errors()
    pid = first.process.pid
    refusal = re.fullmatch(
        rf"train baseline: process {pid} on {re.escape(socket.gethostname())} trains baseline with these "
        rf"params since (\S+) \(less than a minute ago\); wait for it or stop it: `kill {pid}` lets it save",
        line,
    )
    assert refusal, second
    assert datetime.fromisoformat(refusal[1]) <= datetime.now()
    assert first.process.poll() is None
    first.send(signal.SIGTERM)
    assert first.end().status == 75


def test_an_experiment_waits_for_another_that_trains_the_same(repository: Repository) -> None:
    first = StageProcess(repository, "train", "baseline")
    first.wait_for_checkpoint()
    first.send(signal.SIGSTOP)
    second = StageProcess(repository, "train", "baseline", environment={"DVC_EXP_NAME": "another"})
    while "waiting for it" not in second.errors_so_far():
        assert second.process.poll() is None, second.end()
        time.sleep(0.05)
    first.send(signal.SIGCONT)
    assert first.end().status == 0
    found = results(repository.root, "baseline")
    ended = second.end()
    assert ended.status == 0, ended
    (line,) = ended.errors()
    assert line.startswith(f"train baseline: process {first.process.pid} on "), ended
    assert "was complete; its outs are published" in ended.stdout, ended
    assert results(repository.root, "baseline") == found


def test_an_orphaned_trainer_is_met_by_the_next_repro(repository: Repository) -> None:
    """`dvc repro` alone is killed; its trainer goes on."""
    repository.edit_params(lambda params: params["training"].update(token_budget=32 * 4 * 100_000))
    command = ("dvc", "repro", "train@baseline")
    first = subprocess.Popen(
        command,
        cwd=repository.root,
        env=repository.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not checkpoints(repository.root, "baseline"):
            assert first.poll() is None
            time.sleep(0.01)
        first.kill()
        first.wait()
        second = repository.run(*command, may_fail=True)
        assert second.returncode != 0
        refusal = re.search(
            r"^train baseline: process (\d+) on .* with these params since .*", second.stderr, re.MULTILINE
        )
        assert refusal, second
        os.kill(int(refusal[1]), signal.SIGTERM)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{refusal[1]}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (repository.root / "models/baseline").exists()
