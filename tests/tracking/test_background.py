"""Real trainers in processes of their own, with the real sending process, really killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.tracking.sync import sync

# argv: fingerprint, first step, step to hang at or -1, last step
TRAINER = """
import sys, time
from stages.tracking import RunTracker, run_tracker, work_root
run_tracker._WAIT_AT_THE_END_SECONDS = 120  # a busy machine is no failure here
fingerprint, first, hang, last = sys.argv[1], *map(int, sys.argv[2:])
with RunTracker(work_root(), "baseline", fingerprint, "frugal", {"seed": 1}) as run:
    for step in range(first, last):
        if step == hang:
            print("there", flush=True)
            time.sleep(600)
        run.log(step, {"loss": 1 / (1 + step)})
"""


@pytest.fixture
def trainer(root: Path, fingerprint: str) -> Callable[..., subprocess.Popen[str]]:
    def start(first: int, hang: int, last: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", TRAINER, fingerprint, *map(str, (first, hang, last))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.2)


def kill(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_trained_run_is_in_mlflow_when_the_trainer_ends(
    trainer: Any, root: Path, runs: Any, curve: Any
) -> None:
    out, err = trainer(0, -1, 50).communicate()
    assert (out, err) == ("", "")
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert curve(run) == [(step, 1 / (1 + step)) for step in range(50)]
    assert sorted(path.name for path in root.iterdir()) == [".mlflow.db.lock", ".work", "mlflow.db"]


@pytest.mark.slow
def test_killed_and_resumed_twice_it_is_one_run_with_each_step_once(
    trainer: Any, runs: Any, curve: Any, root: Path
) -> None:
    kill(trainer(0, 40, 100))
    second = trainer(30, 70, 100)  # at once: the first one's sender is still at work
    wait_until(lambda: any(run.info.status == "RUNNING" for run in runs()))
    kill(second)
    # The sender outlives the trainer just long enough to say that it was killed.
    wait_until(lambda: [run.info.status for run in runs()] == ["KILLED"])
    out, err = trainer(65, -1, 100).communicate()
    assert (out, err) == ("", "")
    sync(root / ".work")
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert curve(run) == [(step, 1 / (1 + step)) for step in range(100)]


@pytest.mark.slow
def test_no_sender_is_left_behind_by_a_killed_trainer(trainer: Any, root: Path) -> None:
    process = trainer(0, 5, 10)
    sender_pids: list[int] = []

    def found() -> bool:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        sender_pids[:] = map(int, children)
        return bool(sender_pids)

    wait_until(found)
    kill(process)
    wait_until(lambda: not any(_is_alive(pid) for pid in sender_pids), seconds=90)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
