"""Real processes, really signalled: how each ends, what it says, and what it was allowed to finish."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages import interruption
from stages.interruption import EXIT_INTERRUPTED, Interrupted, run_interruptible, stop_signals

REPOSITORY = Path(__file__).parents[1]
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)

PRELUDE = """
import ctypes, os, sys, time
from stages import interruption
from stages.interruption import Interrupted, run_interruptible, stop_signals

interruption._GRACE_SECONDS = 0.5

def say(word):
    print(word, flush=True)

def block_in_native_code():
    # A mutex locked twice: unlike sleep, it goes on waiting after a signal, without Python's global lock.
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    say("ready")
    libc.pthread_mutex_lock(mutex)
"""


class Script:
    """A Python process that has said "ready"."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.expect("ready")

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def expect_error(self, text: str) -> None:
        assert self.process.stderr is not None
        assert text in self.process.stderr.readline()

    def kill(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Its exit status and what it printed since."""
        out, errors = self.process.communicate(timeout=60)
        return self.process.returncode, out, errors


@pytest.fixture
def run() -> Iterator[Callable[[str], Script]]:
    scripts: list[Script] = []

    def start(code: str) -> Script:
        scripts.append(Script(code))
        return scripts[-1]

    yield start
    for script in scripts:
        if script.process.poll() is None:
            script.process.kill()
        script.process.communicate()


SHORT_STAGE = """
def stage():
    try:
        say("ready")
        while True:
            time.sleep(0.01)
    except Exception:
        say("swallowed")
    finally:
        say("cleaned up")

sys.exit(run_interruptible("tokenize", stage, "nothing was written"))
"""


@BOTH
def test_a_stage_ends_with_75_and_one_line(run: Callable[[str], Script], number: signal.Signals) -> None:
    script = run(SHORT_STAGE)
    script.kill(number)
    assert script.end() == (75, "cleaned up\n", f"tokenize: stopped by {number.name}; nothing was written\n")


@pytest.mark.parametrize("delay_seconds", [0.0, 0.1])
def test_the_same_signal_twice_is_one(run: Callable[[str], Script], delay_seconds: float) -> None:
    script = run(SHORT_STAGE)
    script.kill(signal.SIGTERM)
    time.sleep(delay_seconds)
    script.kill(signal.SIGTERM)
    status, _, errors = script.end()
    assert (status, errors) == (75, "tokenize: stopped by SIGTERM; nothing was written\n")


def test_the_same_signal_twice_is_one_while_the_caller_unwinds(run: Callable[[str], Script]) -> None:
    script = run("""
try:
    with stop_signals("train baseline") as stop:
        try:
            with stop.deferred():
                say("ready")
                while stop.requested is None:
                    time.sleep(0.001)
                raise Interrupted(f"{stop.requested} of the caller")
        finally:
            say("unwinding")
            time.sleep(0.1)
            say("unwound")
except Interrupted as error:
    say(error.signal_name)
    raise
""")
    script.kill(signal.SIGTERM)
    script.expect("unwinding")
    script.kill(signal.SIGTERM)
    script.expect("unwound")
    script.kill(signal.SIGTERM)
    assert script.end()[:2] == (75, "SIGTERM of the caller\n")


def test_signals_that_the_parent_ignored_are_heard(run: Callable[[str], Script]) -> None:
    """A container's `trap "" TERM` before dvc reaches the stage."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        script = run(SHORT_STAGE)
    finally:
        signal.signal(signal.SIGTERM, before)
    script.kill(signal.SIGTERM)
    assert script.end()[0] == 75


@BOTH
def test_native_code_does_not_hold_up_the_end(run: Callable[[str], Script], number: signal.Signals) -> None:
    script = run("""sys.exit(run_interruptible("tokenize", block_in_native_code, "nothing was written"))""")
    time.sleep(0.2)
    script.kill(number)
    assert script.end() == (75, "", f"tokenize: stopped by {number.name}; nothing was written\n")


def test_a_matrix_product_does_not_hold_up_the_end(run: Callable[[str], Script]) -> None:
    script = run("""
import torch
def multiply():
    a = torch.ones(10_000, 10_000)
    say("ready")
    while True:
        a @ a
sys.exit(run_interruptible("evaluate", multiply))
""")
    script.kill(signal.SIGTERM)
    assert script.end()[0] == 75


TRAINER = """
try:
    with stop_signals("train baseline", "resume with `dvc repro`") as stop:
        saved = 0
        with stop.deferred():
            say("ready")
            while stop.requested is None:
                time.sleep(0.01)
            say(f"saving {stop.requested}")
            time.sleep(SAVE_SECONDS)
            say("saved")
            stop.raise_if_requested()
except Interrupted as error:
    print(stop.message(error.signal_name), file=sys.stderr)
    raise
"""


@BOTH
def test_a_deferred_signal_waits_for_the_save(run: Callable[[str], Script], number: signal.Signals) -> None:
    script = run(TRAINER.replace("SAVE_SECONDS", "0.5"))
    script.kill(number)
    status, out, errors = script.end()
    assert (status, out) == (75, f"saving {number.name}\nsaved\n")
    assert errors.splitlines() == [
        f"{number.name}: finishing the micro-batch and saving; again to stop at once",
        f"train baseline: stopped by {number.name}; resume with `dvc repro`",
    ]


@BOTH
def test_a_second_signal_stops_at_once(run: Callable[[str], Script], number: signal.Signals) -> None:
    script = run(TRAINER.replace("SAVE_SECONDS", "60"))
    script.kill(signal.SIGTERM)
    script.expect("saving SIGTERM")
    script.expect_error("SIGTERM: finishing")
    time.sleep(interruption._SAME_SIGNAL_SECONDS + 0.1)
    script.kill(number)
    status, out, errors = script.end()
    assert (status, out) == (128 + number, "")
    assert errors == f"train baseline: {number.name} again, stopped at once\n"


def test_a_second_signal_stops_native_code_at_once(run: Callable[[str], Script]) -> None:
    script = run("""
with stop_signals("train baseline") as stop, stop.deferred():
    block_in_native_code()
""")
    script.kill(signal.SIGINT)
    script.expect_error("SIGINT: finishing the micro-batch and saving; again to stop at once")
    time.sleep(1.0)  # deferred, so the half second of PRELUDE does not end it
    assert script.process.poll() is None
    script.kill(signal.SIGINT)
    assert script.end()[0] == 128 + signal.SIGINT


def test_a_cleanup_that_hangs_does_not_hold_up_the_end(run: Callable[[str], Script]) -> None:
    script = run("""
interruption._UNWIND_SECONDS = 0.5
def stage():
    try:
        say("ready")
        time.sleep(60)
    finally:
        time.sleep(60)
sys.exit(run_interruptible("compare", stage, "not complete"))
""")
    script.kill(signal.SIGTERM)
    assert script.end() == (75, "", "compare: stopped by SIGTERM; not complete\n")


def test_a_signal_to_a_forked_worker_is_its_own(run: Callable[[str], Script]) -> None:
    script = run("""
with stop_signals("train baseline") as stop, stop.deferred():
    reading_end, writing_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing_end, b"x")
        time.sleep(60)
    os.read(reading_end, 1)
    os.kill(child, 15)
    ended, deadline = 0, time.monotonic() + 5
    while not ended:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    say("ready")
    time.sleep(0.5)
    say(f"child {os.waitstatus_to_exitcode(status)}, parent {stop.requested}")
""")
    assert script.end() == (0, "child -15, parent None\n", "")


def test_a_process_it_starts_inherits_nothing(run: Callable[[str], Script]) -> None:
    script = run("""
import subprocess
state = "import signal; print(signal.getsignal(15).name, signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
say("ready")
with stop_signals() as stop, stop.deferred():
    subprocess.run([sys.executable, "-c", state])
""")
    assert script.end() == (0, "SIG_DFL set()\n", "")


def test_a_ctrl_c_to_the_whole_group(run: Callable[[str], Script]) -> None:
    """As a terminal sends it: the tools that the stage runs die of it, the stage still saves."""
    script = run("""
import subprocess
try:
    with stop_signals("train baseline") as stop, stop.deferred():
        tool = subprocess.Popen([sys.executable, "-c", "import signal, time\\n"
            "signal.signal(signal.SIGINT, signal.SIG_DFL)\\nprint('ready', flush=True)\\ntime.sleep(60)"])
        tool.wait()
        while stop.requested is None:
            time.sleep(0.01)
        say(f"tool {tool.returncode}; saved")
        stop.raise_if_requested()
except Interrupted:
    raise
""")
    os.killpg(script.process.pid, signal.SIGINT)
    status, out, _ = script.end()
    assert (status, out) == (75, "tool -2; saved\n")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["plan", "precision"])
def test_a_command_ends_with_75_and_one_line(tmp_path: Path, stage: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    (tmp_path / "params.yaml").write_bytes((REPOSITORY / "params.yaml").read_bytes())
    with subprocess.Popen(
        [sys.executable, "-m", f"stages.{stage}"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not is_caught(process.pid, signal.SIGTERM):
            time.sleep(0.01)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert re.fullmatch(rf"{stage}: stopped by SIGTERM; it is not complete; .* again\n", errors)
    assert [path.name for path in tmp_path.rglob("*")] == ["params.yaml"]


def is_caught(pid: int, number: int) -> bool:
    """Whether that process has a handler of its own for the signal (proc(5), SigCgt)."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert mask, "the process has ended"
    return bool(int(mask[1], 16) >> (number - 1) & 1)


def test_the_old_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with stop_signals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    with pytest.raises(Interrupted), stop_signals():
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_deferred_is_not_entered_once_a_signal_came() -> None:
    with pytest.raises(Interrupted) as raised, stop_signals() as stop:
        with stop.deferred():
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested == "SIGTERM"
        with stop.deferred():
            pytest.fail("entered")
    assert (raised.value.code, raised.value.signal_name) == (EXIT_INTERRUPTED, "SIGTERM")


def test_without_a_signal_the_stage_has_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert [run_interruptible("x", lambda: status) for status in (0, 1)] == [0, 1]  # noqa: B023
    with pytest.raises(ZeroDivisionError):
        run_interruptible("x", lambda: 1 // 0)
    assert capsys.readouterr().err == ""
