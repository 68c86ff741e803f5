"""One process at a time in a work folder, and old ones pruned, never one in use. Real processes contend."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.work_folder import WorkFolderError, hold_work_folder

REPOSITORY = Path(__file__).parents[1]
FINGERPRINT = "0123456789abcdef" * 4
DAY = 86400.0

HOLDER = """
import sys, time
from pathlib import Path
from stages.work_folder import WorkFolderError, hold_work_folder
try:
    with hold_work_folder(Path(sys.argv[1]), "train", sys.argv[2], sys.argv[3], waits_as={waits_as}):
        print("held", flush=True)
        {body}
except WorkFolderError as error:
    print(error, flush=True)
    sys.exit(1)
"""


class Holder:
    def __init__(
        self, root: Path, variant: str, fingerprint: str, body: str, waits_as: str | None = None
    ) -> None:
        code = HOLDER.format(body=body, waits_as=repr(waits_as))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(root), variant, fingerprint],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE if waits_as else None,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Holder]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    holders: list[Holder] = []

    def begin(
        variant: str = "baseline",
        fingerprint: str = FINGERPRINT,
        body: str = "sys.stdin.read()",
        waits_as: str | None = None,
    ) -> Holder:
        holders.append(Holder(tmp_path, variant, fingerprint, body, waits_as))
        return holders[-1]

    yield begin
    for holder in holders:
        holder.kill()


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_folder_is_keyed_by_stage_variant_and_fingerprint_and_stays(tmp_path: Path) -> None:
    with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT) as folder:
        assert folder == tmp_path / "train/baseline/0123456789abcdef"
        (folder / "checkpoint").write_text("state")
    with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT) as folder:
        assert (folder / "checkpoint").read_text() == "state"


def test_fresh_empties_it(tmp_path: Path) -> None:
    with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT) as folder:
        (folder / "checkpoint").write_text("state")
        (folder / "steps/7").mkdir(parents=True)
        (folder / "link").symlink_to(tmp_path)
    with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT, fresh=True) as folder:
        assert contents(folder) == {"lock"}
    assert tmp_path.is_dir()


def test_a_second_trainer_is_told_who_holds_it(tmp_path: Path, start: Start) -> None:
    holder = start()
    assert holder.line() == "held"
    with (
        pytest.raises(WorkFolderError) as raised,
        hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT, fresh=True),
    ):
        pytest.fail("held twice")
    pid = holder.process.pid
    message = re.fullmatch(
        rf"process {pid} on {re.escape(socket.gethostname())} trains baseline with these params since (\S+) "
        rf"\(less than a minute ago\); wait for it or stop it: `kill {pid}` lets it save",
        str(raised.value),
    )
    assert message, raised.value
    assert abs(datetime.fromisoformat(message[1]).timestamp() - time.time()) < 60


def test_who_waits_says_once_for_whom_and_finds_what_that_one_left(tmp_path: Path, start: Start) -> None:
    holder = start(body="sys.stdin.readline()")
    assert holder.line() == "held"
    waiting = start(waits_as="train baseline")
    assert waiting.process.stderr is not None and holder.process.stdin is not None
    pid = holder.process.pid
    assert re.fullmatch(
        rf"train baseline: process {pid} on \S+ trains baseline with these params since \S+ \(less than a "
        rf"minute ago\); waiting for it \(`kill {pid}` stops it\)\n",
        waiting.process.stderr.readline(),
    )
    (tmp_path / "train/baseline" / FINGERPRINT[:16] / "checkpoint").write_text("state")
    holder.process.communicate("go\n")
    assert waiting.line() == "held"
    assert waiting.process.communicate() == ("", "")
    assert contents(tmp_path / "train/baseline" / FINGERPRINT[:16]) == {"lock", "checkpoint"}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(30, "less than a minute"), (90, "1 minute"), (3510, "58 minutes"), (7300, "2 hours"), (90000, "1 day")],
)
def test_it_says_since_when(tmp_path: Path, start: Start, seconds: int, words: str) -> None:
    assert start().line() == "held"
    lock = tmp_path / "train/baseline" / FINGERPRINT[:16] / "lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"since": time.time() - seconds}))
    with (
        pytest.raises(WorkFolderError, match=rf"\({words} ago\)"),
        hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT),
    ):
        pytest.fail("held twice")


def test_other_variants_and_other_params_are_free(tmp_path: Path, start: Start) -> None:
    assert start().line() == "held"
    with (
        hold_work_folder(tmp_path, "train", "frugal", FINGERPRINT),
        hold_work_folder(tmp_path, "train", "baseline", "f" * 64),
    ):
        pass


def test_a_killed_holder_holds_nothing(tmp_path: Path, start: Start) -> None:
    holder = start()
    assert holder.line() == "held"
    holder.kill()
    with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT):
        pass


def test_a_worker_that_outlives_its_trainer_holds_nothing(tmp_path: Path, start: Start) -> None:
    """A forked process shares the open lock file."""
    holder = start(
        body="""
        import os
        if (child := os.fork()) == 0:
            time.sleep(60)
        print(child, flush=True)
        sys.stdin.read()
"""
    )
    assert holder.line() == "held"
    child = int(holder.line())
    try:
        holder.kill()
        with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT):
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_of_many_at_once_one_gets_it(start: Start) -> None:
    holders = [start() for _ in range(6)]
    lines = {holder.process.pid: holder.line() for holder in holders}
    winners = [pid for pid, line in lines.items() if line == "held"]
    assert len(winners) == 1
    assert all(f"process {winners[0]} on" in line for pid, line in lines.items() if pid not in winners)


def test_taking_and_pruning_race_for_the_same_folders(tmp_path: Path, start: Start) -> None:
    """Each process takes folders and with that prunes others'; what one holds never vanishes under it."""
    body = """
        pass
    import random
    random.seed(int(sys.argv[3], 16))
    for turn in range(150):
        fingerprint = f"{random.randrange(7):016x}"
        try:
            with hold_work_folder(Path(sys.argv[1]), "train", "race", fingerprint) as folder:
                mine = folder / f"step-{turn}"
                mine.write_text(sys.argv[3])
                time.sleep(random.random() / 500)
                assert mine.read_text() == sys.argv[3]
                mine.unlink()
        except WorkFolderError as error:
            assert "trains race" in str(error), error
    print("done", flush=True)
"""
    holders = [start(fingerprint=f"{number:016x}", body=body) for number in range(3)]
    assert [holder.line() for holder in holders] == ["held"] * 3
    assert [holder.line() for holder in holders] == ["done"] * 3
    assert len(contents(tmp_path / "train/race")) <= 3 + 2, "each kept 3 and what the others held"


def make_folder(
    root: Path, variant: str, fingerprint: str, age_seconds: float, *, has_lock: bool = True
) -> Path:
    folder = root / "train" / variant / fingerprint
    folder.mkdir(parents=True)
    (folder / "checkpoint").write_text("state")
    if has_lock:
        (folder / "lock").write_text("{}")
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - age_seconds,) * 2)
    return folder


@settings(max_examples=60)
@given(
    ages_days=st.lists(st.sampled_from([0.1, 1, 2, 29, 31, 400]), max_size=6),
    other_ages_days=st.lists(st.sampled_from([3.0, 29, 31]), max_size=5),
)
def test_pruned_are_the_old_and_all_but_three(
    tmp_path_factory: pytest.TempPathFactory, ages_days: list[float], other_ages_days: list[float]
) -> None:
    root = tmp_path_factory.mktemp("work")
    wanted = {}
    # The one in use is the latest of its own variant's three.
    for variant, days, places in (("mine", ages_days, 2), ("other", other_ages_days, 3)):
        ages = [age * DAY + 10 * number for number, age in enumerate(days)]
        for number, age in enumerate(ages):
            make_folder(root, variant, f"{number:016x}", age)
        latest = sorted(range(len(ages)), key=lambda number: ages[number])[:places]
        wanted[variant] = {f"{number:016x}" for number in latest if ages[number] < 30 * DAY}
    with hold_work_folder(root, "train", "mine", FINGERPRINT):
        assert contents(root / "train/mine") == wanted["mine"] | {FINGERPRINT[:16]}
        if other_ages_days:
            assert contents(root / "train/other") == wanted["other"]


def test_what_is_held_is_never_pruned(tmp_path: Path, start: Start) -> None:
    holder = start(fingerprint="e" * 64)
    assert holder.line() == "held"
    held = tmp_path / "train/baseline" / ("e" * 16)
    for path in (held, held / "lock"):
        os.utime(path, (0, 0))
    old = make_folder(tmp_path, "baseline", "0" * 16, 40 * DAY)
    with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT):
        assert held.exists() and not old.exists()
    holder.kill()
    with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT):
        assert not held.exists()


def test_a_run_of_many_weeks_is_as_old_as_its_last_checkpoint(tmp_path: Path) -> None:
    long_run = make_folder(tmp_path, "baseline", "0" * 16, 40 * DAY)
    os.utime(long_run / "checkpoint")
    os.utime(long_run, (0, 0))
    with hold_work_folder(tmp_path, "train", "frugal", FINGERPRINT):
        assert long_run.exists()


def test_leftovers_of_killed_processes_are_pruned(tmp_path: Path) -> None:
    no_lock = make_folder(tmp_path, "baseline", "0" * 16, 40 * DAY, has_lock=False)
    half_removed = make_folder(tmp_path, "baseline", f".{'1' * 16}.removed", 0)
    same = make_folder(tmp_path, "baseline", "1" * 16, 40 * DAY)
    with hold_work_folder(tmp_path, "train", "frugal", FINGERPRINT):
        assert not (no_lock.exists() or half_removed.exists() or same.exists())


def test_a_folder_pruned_in_the_moment_it_is_taken_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    taken = tmp_path / "train/baseline" / FINGERPRINT[:16]
    flock = fcntl.flock

    def flock_too_late(lock: int, operation: int) -> None:
        monkeypatch.undo()
        taken.rename(tmp_path / "pruned")
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", flock_too_late)
    with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT) as folder:
        assert contents(folder) == {"lock"}
        assert f"process {os.getpid()} on" in start().line()


def test_a_folder_made_again_in_the_moment_it_is_pruned_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_folder(tmp_path, "baseline", "0" * 16, 40 * DAY)
    flock = fcntl.flock
    is_of_pruner = [False, True]

    def flock_too_late(lock: int, operation: int) -> None:
        if is_of_pruner.pop(0):
            monkeypatch.undo()
            old.rename(tmp_path / "pruned by another")
            make_folder(tmp_path, "baseline", old.name, 0)
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", flock_too_late)
    with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT):
        assert (old / "checkpoint").exists()


def test_other_stages_and_the_journals_are_left_alone(tmp_path: Path) -> None:
    journal = tmp_path / "tracking/baseline/0123"
    journal.mkdir(parents=True)
    os.utime(journal, (0, 0))
    with hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT):
        assert journal.exists()


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("a file")
    with (
        pytest.raises(
            WorkFolderError, match=r"/train/baseline/0123456789abcdef: cannot be .*Not a directory"
        ),
        hold_work_folder(tmp_path, "train", "baseline", FINGERPRINT),
    ):
        pytest.fail("held")


def test_a_full_disk_is_named_with_the_reason(start: Start, tmp_path: Path) -> None:
    """The limit on a file's size stands for the full disk: both fail in `write`."""
    code = HOLDER.format(body="pass", waits_as=None).replace(
        "try:",
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\ntry:",
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "baseline", FINGERPRINT],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (1, "")
    assert ran.stdout == (
        f"{tmp_path}/train/baseline/0123456789abcdef: cannot be used to keep work in progress "
        "(File too large); make it a writable folder on a disk with free space\n"
    )
