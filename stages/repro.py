"""`python -m stages.repro [ARGUMENTS OF dvc repro]`: `dvc repro` on a machine that may be taken away.

What `make repro` and the container run. To `dvc repro` it adds what that leaves to a person at a terminal:

- the machine is looked at first (`stages.preflight`), and MLflow's database made;
- SIGTERM, SIGINT or SIGHUP reaches the stage that runs, which saves, and no other stage begins. The exit
  status is then 75 ("try again"), so that a cloud's restart policy can tell it from a failure;
- in a container, what a killed container left of DVC's locks is removed.

It knows nothing of what stages do and holds no memory to speak of beside them: torch and MLflow are imported
only in processes of their own.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from stages.container_image import ContainerImageError, check_constraints
from stages.interruption import EXIT_INTERRUPTED, STOP_FILE
from stages.tracking import project_root, work_root
from stages.work_folder import is_any_held

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    root = project_root()
    try:
        check_constraints(root)
        with share_checkout(root) as lock, stop_file() as file:
            return Supervisor(file).run(arguments, lock)
    except (ContainerImageError, OSError) as error:
        _say(str(error))
        return 1


class Supervisor:
    """Runs one command after another and passes on the signals that end this process."""

    def __init__(self, stop_file: Path) -> None:
        self._stop_file = stop_file
        self._stopped_by: str | None = None
        self._dvc: subprocess.Popen[bytes] | None = None

    def run(self, arguments: list[str], lock: int) -> int:
        """Preflight, MLflow, `dvc repro ARGUMENTS`; the exit status.

        Args:
            arguments: of `dvc repro`.
            lock: a file descriptor that DVC's process keeps open too, should this one be killed.
        """
        for number in _FORWARDED:
            signal.signal(number, self._pass_on)
        for module in ("stages.preflight", "stages.tracking.initialise"):
            status = subprocess.run([sys.executable, "-m", module], check=False).returncode
            if status or self._stopped_by is not None:
                return self._exit_status(status)
        # A group of its own: each signal comes to the stage once, by this process, and not a second time
        # from the terminal or the container's init, which would mean "stop at once".
        self._dvc = subprocess.Popen(
            # Another `dvc repro` may commit for longer than the 3 s that DVC would wait for its lock.
            [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *arguments],
            env=_environment(self._stop_file),
            pass_fds=[lock],
            process_group=0,
            preexec_fn=_ignore_signals,
        )
        if self._stopped_by is not None:  # between the last look and Popen
            self._signal_group(signal.SIGTERM)
        return self._exit_status(self._dvc.wait())

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stopped_by = self._stopped_by or signal.Signals(number).name
        # First, for a stage that has no handler yet: it looks for the file as soon as it has one.
        with contextlib.suppress(FileNotFoundError):  # all is over
            self._stop_file.touch()
        # Stages know no SIGHUP: whose terminal is gone wants what SIGTERM does.
        self._signal_group(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _signal_group(self, number: int) -> None:
        if self._dvc is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._dvc.pid, number)

    def _exit_status(self, status: int) -> int:
        """This process's, for a child's `returncode`."""
        is_complete = status == 0 and self._dvc is not None
        if self._stopped_by is not None and not is_complete:
            _say(f"stopped by {self._stopped_by}; run it again, it goes on from there")
            return EXIT_INTERRUPTED
        return status if status >= 0 else 128 - status  # as a shell does for a child that a signal ended


def _ignore_signals() -> None:
    """In DVC's process, before it starts. DVC would end on SIGTERM and leave its stage an orphan; stages set
    handlers of their own."""
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)


def _environment(stop_file: Path) -> dict[str, str]:
    environment = os.environ | {STOP_FILE: str(stop_file)}
    # dvc.yaml says `python -m stages.…`, and that must be this interpreter.
    if shutil.which("python") != sys.executable:
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return environment


@contextlib.contextmanager
def stop_file() -> Iterator[Path]:
    """A path where nothing is; a file there says that a stop was asked for."""
    with tempfile.TemporaryDirectory(prefix="frugal-") as folder:
        yield Path(folder) / "stop"


@contextlib.contextmanager
def share_checkout(root: Path) -> Iterator[int]:
    """Hold this checkout beside others that do; where nobody else does, remove DVC's stale locks.

    DVC knows the holder of a lock by its process id. In a container, ids begin anew: those of a container
    that was killed are those of innocent processes in the next, and DVC would call the checkout busy for
    ever. Outside of containers DVC removes the locks of dead processes itself.

    Yields:
        The file descriptor of the lock, which ends with the last process that has it open.
    """
    work_root().mkdir(parents=True, exist_ok=True)
    lock = os.open(work_root() / "repro.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # another holds it: its locks are alive
        else:
            _remove_stale_lock(root)
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield lock
    finally:
        os.close(lock)


def _remove_stale_lock(root: Path) -> None:
    lock = root / ".dvc" / "tmp" / "rwlock"
    is_in_container = "FRUGAL_SOURCE" in os.environ
    # A `dvc repro` on the host that trains in this checkout holds no repro.lock, but its work folder.
    if is_in_container and _names_a_holder(lock) and not is_any_held(work_root()):
        lock.unlink()
        _say(f"removed {lock.relative_to(root)}, which a killed container had left")


def _names_a_holder(lock: Path) -> bool:
    try:
        holders = json.loads(lock.read_text())
        return any(holders.values())
    except FileNotFoundError:
        return False
    except (ValueError, AttributeError):
        return True  # half written: DVC would refuse to read it


def _say(text: str) -> None:
    print(f"repro: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
