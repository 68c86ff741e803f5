"""Real ranks, really killed, stopped and hung: what the launcher says, returns and leaves running."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages import rank_launch
from stages.rank_launch import launch_ranks

REPOSITORY = Path(__file__).parents[1]
GOES_ON = "`dvc repro` goes on from the last checkpoint"

RANK = """
import os, signal, sys, time
from stages.interruption import Interrupted, stop_signals
from stages.rank_process import is_lost_peer, leave, leave_for_lost_peer, record_failure

rank = int(os.environ["RANK"])
folder = sys.argv[1]

def say(word):
    open(f"{folder}/{rank}.{word}", "x").close()
"""

COLLECTIVES = """
import torch.distributed as dist, torch
from datetime import timedelta

def meet(timeout_seconds=60.0):
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))

def add(number):
    total = torch.tensor([number])
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        leave_for_lost_peer(error, 1 / 60)
    return int(total)
"""

# Saves longer than a signal's double is forgiven, and counts the signals that come meanwhile.
SAVING = """
signals = []
try:
    with stop_signals("train x", "saved") as stop:
        with stop.deferred():
            own = signal.getsignal(signal.SIGTERM)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *arguments: (signals.append(arguments[0]), own(*arguments)))
            say("ready")
            while stop.requested is None:
                time.sleep(0.01)
            time.sleep(0.5)
            say(f"saved after {len(signals)}")
        stop.raise_if_requested()
except Interrupted as error:
    if rank == 0:
        print(stop.message(error.signal_name), file=sys.stderr, flush=True)
    raise
"""


@pytest.fixture
def rank_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The interpreter's arguments for ranks that run some code."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where a killed launcher leaves its folder

    def write(code: str) -> list[str]:
        path = tmp_path / "rank.py"
        path.write_text(RANK + code, encoding="utf-8")
        return [str(path), str(tmp_path)]

    return write


def said(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[0-9].*"))


def wait_for(folder: Path, *words: str) -> None:
    deadline = time.monotonic() + 60
    while not set(words) <= set(said(folder)):
        assert time.monotonic() < deadline, said(folder)
        time.sleep(0.01)


@contextlib.contextmanager
def when_ready(folder: Path, act: Callable[[], None]) -> Iterator[None]:
    """Does something in another thread, once two ranks have said that they are ready."""

    def run() -> None:
        wait_for(folder, "0.ready", "1.ready")
        act()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


class Launcher:
    """`launch_ranks` in a process of its own, under the stage's own handlers."""

    def __init__(self, arguments: list[str]) -> None:
        code = (
            "import sys; from stages.interruption import stop_signals; from stages.rank_launch import *\n"
            f"with stop_signals('launcher'): sys.exit(launch_ranks('train x', 2, {arguments}))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, process_group=0
        )

    def end(self) -> tuple[int, list[str]]:
        """Its exit status and the lines on stderr."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors.splitlines()


@pytest.fixture
def launcher() -> Iterator[Callable[[list[str]], Launcher]]:
    launchers: list[Launcher] = []

    def start(arguments: list[str]) -> Launcher:
        launchers.append(Launcher(arguments))
        return launchers[-1]

    yield start
    for started in launchers:
        if started.process.poll() is None:
            started.process.kill()
        started.process.communicate()


def test_ranks_have_torchruns_environment_and_share_the_cores(
    rank_script: Callable[[str], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(rank_launch, "_cores", lambda: 7)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR")
    code = f"say(' '.join(os.environ[name] for name in {names}))"
    assert launch_ranks("train x", 2, rank_script(code)) == 0
    assert said(tmp_path) == ["0.0 0 2 2 3 127.0.0.1", "1.1 1 2 2 3 127.0.0.1"]
    assert capfd.readouterr() == ("", "")


def test_the_users_threads_are_kept(
    rank_script: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch_ranks("train x", 2, rank_script("say(os.environ['OMP_NUM_THREADS'])")) == 0
    assert said(tmp_path) == ["0.5", "1.5"]


def test_a_killed_rank_is_named_in_one_line(
    rank_script: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
meet()
for step in range(1_000_000):
    if step == 10 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    add(1)
"""
    began = time.monotonic()
    assert launch_ranks("train x", 2, rank_script(COLLECTIVES + code)) == 1
    assert time.monotonic() - began < rank_launch._GRACE_SECONDS
    line = f"train x: rank 1 of 2 was killed by SIGKILL (out of host memory?); {GOES_ON}\n"
    assert capfd.readouterr() == ("", line)


def test_a_recorded_error_is_the_cause_whoever_left_first(
    rank_script: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
if rank == 0:
    leave_for_lost_peer(RuntimeError("Connection closed by peer"), 10)
time.sleep(0.3)
record_failure("the loss is not finite")
record_failure("what came of it")
leave(1)
"""
    assert launch_ranks("train x", 3, rank_script(code)) == 1
    assert capfd.readouterr() == ("", "train x: rank 1 of 3: the loss is not finite\n")


def test_what_came_of_a_failure_is_not_called_its_cause(
    rank_script: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    """NCCL's watchdog aborts the ranks that lost one."""
    code = """
if rank == 0:
    os.abort()
time.sleep(0.3)
record_failure("the loss is not finite")
leave(1)
"""
    assert launch_ranks("train x", 2, rank_script(code)) == 1
    assert capfd.readouterr() == ("", "train x: rank 1 of 2: the loss is not finite\n")


def test_an_error_of_all_ranks_is_said_once(
    rank_script: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    code = "time.sleep(rank / 5); record_failure('the plan is missing'); leave(1)"
    assert launch_ranks("train x", 3, rank_script(code)) == 1
    assert capfd.readouterr() == ("", "train x: the plan is missing\n")


def test_an_unexpected_error_has_one_traceback(
    rank_script: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
try:
    1 / 0
except ZeroDivisionError as error:
    record_failure(repr(error), error)
    leave(1)
"""
    assert launch_ranks("train x", 2, rank_script(code)) == 1
    _, errors = capfd.readouterr()
    assert errors.count("Traceback") == errors.count("    1 / 0") == 1
    assert errors.splitlines()[-1] == "train x: ZeroDivisionError('division by zero')"


def test_a_rank_that_hangs_after_anothers_end_is_killed(
    rank_script: Callable[[str], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rank_launch, "_GRACE_SECONDS", 0.5)
    code = """
if rank == 1:
    leave(3)
say(f"pid {os.getpid()}")
while True:
    time.sleep(60)
"""
    assert launch_ranks("train x", 2, rank_script(code)) == 1
    assert capfd.readouterr() == ("", f"train x: rank 1 of 2 left with exit status 3; {GOES_ON}\n")
    (word,) = said(tmp_path)
    assert not Path(f"/proc/{word.split()[-1]}").exists()


def test_a_rank_that_does_not_answer_is_named_with_the_timeout(
    rank_script: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rank_launch, "_GRACE_SECONDS", 0.5)
    code = """
meet(timeout_seconds=1)
add(1)
if rank == 1:
    time.sleep(60)
add(1)
"""
    assert launch_ranks("train x", 2, rank_script(COLLECTIVES + code)) == 1
    assert capfd.readouterr() == (
        "",
        "train x: rank 0 of 2: another rank did not answer for 0.0166667 minutes "
        f"(hardware.collective_timeout_minutes); rank 1 did not end; {GOES_ON}\n",
    )


@pytest.mark.parametrize(
    ("to_launcher", "to_group"), [(None, "SIGINT"), ("SIGTERM", "SIGTERM")], ids=["Ctrl-C", "both"]
)
def test_a_stop_reaches_every_rank_once(
    rank_script: Callable[[str], list[str]],
    launcher: Callable[[list[str]], Launcher],
    tmp_path: Path,
    to_launcher: str | None,
    to_group: str | None,
) -> None:
    started = launcher(rank_script(SAVING))
    wait_for(tmp_path, "0.ready", "1.ready")
    if to_launcher:
        started.process.send_signal(signal.Signals[to_launcher])
    if to_group:
        os.killpg(started.process.pid, signal.Signals[to_group])
    status, lines = started.end()
    assert status == 75
    assert said(tmp_path) == ["0.ready", "0.saved after 1", "1.ready", "1.saved after 1"]
    name = to_launcher or to_group
    told = f"{name}: finishing the micro-batch and saving; again to stop at once"
    assert lines == [told, told, f"train x: stopped by {name}; saved"]


def test_a_stop_of_one_rank_is_the_stop_of_all(
    rank_script: Callable[[str], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks agree on the step; one may leave long before another, and no rank is hurried."""
    code = """
with stop_signals("train x") as stop, stop.deferred():
    meet()
    step = 0
    while not add(stop.requested is not None):
        step += 1
        if step == 1:
            say(f"pid {os.getpid()}")
            say("ready")
    time.sleep(0.5 * (1 - rank))
    say(f"stopped at {step}")
    leave(75)
"""

    def stop_the_first() -> None:
        os.kill(pids(tmp_path)[0], signal.SIGTERM)

    with when_ready(tmp_path, stop_the_first):
        assert launch_ranks("train x", 2, rank_script(COLLECTIVES + code)) == 75
    first, second = (word.partition(".")[2] for word in said(tmp_path) if "stopped at" in word)
    assert first == second
    told = "SIGTERM: finishing the micro-batch and saving; again to stop at once\n"
    assert capfd.readouterr() == ("", told)


def test_a_stop_before_the_ranks_handle_signals_is_no_failure(
    rank_script: Callable[[str], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
say("ready")
time.sleep(0.5)
try:
    with stop_signals("train x", "nothing to save") as stop:
        stop.raise_if_requested()
        time.sleep(60)
except Interrupted as error:
    if rank == 0:
        print(stop.message(error.signal_name), file=sys.stderr, flush=True)
    raise
"""
    with when_ready(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert launch_ranks("train x", 2, rank_script(code)) == 75
    assert capfd.readouterr() == ("", "train x: stopped by SIGTERM; nothing to save\n")


def test_a_stop_that_one_rank_heard_before_it_met_the_others(
    rank_script: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
if rank == 1:
    leave(75)
leave_for_lost_peer(RuntimeError("Connection closed by peer"), 10)
"""
    assert launch_ranks("train x", 2, rank_script(code)) == 75
    assert capfd.readouterr() == ("", f"train x: stopped; {GOES_ON}\n")


def test_a_second_signal_ends_all_at_once(
    rank_script: Callable[[str], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
with stop_signals("train x") as stop, stop.deferred():
    say(f"pid {os.getpid()}")
    say("ready")
    time.sleep(60)
"""

    def stop_twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(rank_launch._SAME_SIGNAL_SECONDS + 0.2)
        os.kill(os.getpid(), signal.SIGINT)

    with when_ready(tmp_path, stop_twice):
        assert launch_ranks("train x", 2, rank_script(code)) == 128 + signal.SIGINT
    assert capfd.readouterr().err.splitlines()[-1] == "train x: SIGINT again, stopped at once"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids(tmp_path))


def test_ranks_end_with_a_launcher_that_was_killed(
    rank_script: Callable[[str], list[str]], launcher: Callable[[list[str]], Launcher], tmp_path: Path
) -> None:
    started = launcher(rank_script("say(f'pid {os.getpid()}'); say('ready'); time.sleep(60)"))
    wait_for(tmp_path, "0.ready", "1.ready")
    started.process.kill()
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in pids(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pids(folder: Path) -> list[int]:
    found = [int(word.split()[-1]) for word in said(folder) if ".pid" in word]
    assert len(found) == 2
    return found


def is_running(pid: int) -> bool:
    """An orphan that has ended may stay a zombie where nothing reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_stages_own_handlers_come_back(rank_script: Callable[[str], list[str]]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert launch_ranks("train x", 1, rank_script("")) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
