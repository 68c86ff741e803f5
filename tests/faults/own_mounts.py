"""Mounts that only the test's own processes see: a small disk, a read-only folder."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WAYS = (("unshare", "--mount"), ("unshare", "--mount", "--map-root-user"))


class NoMountsError(RuntimeError):
    """This machine lets us mount nothing; says why."""


class OwnMounts:
    """A mount namespace that lives as long as one sleeping process."""

    def __init__(self, pid: int, way: tuple[str, ...]) -> None:
        self._pid = pid
        user = ("--user", "--preserve-credentials") if "--map-root-user" in way else ()
        self._enter = ("nsenter", "--target", str(pid), *user, "--mount")

    def run(self, *command: str) -> None:
        subprocess.run((*self._enter, *command), check=True, capture_output=True)

    def prefix(self, folder: Path) -> tuple[str, ...]:
        """Runs a command in `folder` where the mounts are seen. (A working folder that a process brings
        along is the one outside.)"""
        return (*self._enter, "sh", "-c", 'cd "$0" && exec "$@"', str(folder))

    def seen(self, path: Path) -> Path:
        """The same path for this process, which is outside."""
        return Path(f"/proc/{self._pid}/root{path.resolve()}")

    def small_disk(self, folder: Path, size: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder))

    def resize(self, folder: Path, size: str) -> None:
        self.run("mount", "-o", f"remount,size={size}", str(folder))

    def read_only(self, folder: Path) -> None:
        """Also for root, whom modes do not keep from writing."""
        self.run("mount", "--bind", str(folder), str(folder))
        self.run("mount", "-o", "remount,bind,ro", str(folder))

    def writable(self, folder: Path) -> None:
        self.run("umount", str(folder))


@contextmanager
def own_mounts() -> Iterator[OwnMounts]:
    """
    Raises:
        NoMountsError: no way to make a mount namespace works here.
    """
    reasons = []
    for way in _WAYS:
        try:
            holder = subprocess.Popen(
                (*way, "--propagation", "private", "sh", "-c", "echo ready; exec sleep 3600"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise NoMountsError(f"unshare: {error}") from None
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() == "ready\n":
            mounts = OwnMounts(holder.pid, way)
            try:
                mounts.run("mount", "-t", "tmpfs", "none", "/mnt")
            except subprocess.CalledProcessError as error:
                reasons.append(f"{' '.join(way)}: {error.stderr.decode().strip()}")
                _end(holder)
                continue
            try:
                yield mounts
            finally:
                _end(holder)
            return
        reasons.append(f"{' '.join(way)}: {holder.stderr.read().strip()}")
        _end(holder)
    raise NoMountsError("; ".join(reasons))


def _end(holder: subprocess.Popen[str]) -> None:
    if holder.poll() is None:
        os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    for pipe in (holder.stdout, holder.stderr):
        if pipe is not None:
            pipe.close()
