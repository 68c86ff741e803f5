"""Which GPUs a process uses: the first ones that no other process of this machine has taken.

Two trainings on one GPU run out of memory or spoil each other's speed. So who uses a GPU holds a lock that is
named after the GPU's UUID, in one folder for all checkouts, experiments and users of the machine.
"""

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stages.file_lock import lock_now, read_holder, sign, unlock

LOCKS = Path("/tmp/frugal-gpus")
"""Not $TMPDIR, nor the user's runtime folder, which ends with his last login: all must find the same."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CHOOSING = "choosing"
_SECONDS_BETWEEN_LOOKS = 0.5

# CUDA reads CUDA_VISIBLE_DEVICES once, when it starts. So another process asks it what it sees.
_LIST_UUIDS = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for number in range(count.value):
    device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
    assert cuda.cuDeviceGet(ctypes.byref(device), number) == 0
    assert cuda.cuDeviceGetUuid_v2(uuid, device) == 0
    print(uuid.raw.hex())
"""
_LIST_SECONDS = 120.0


class DeviceLockError(RuntimeError):
    """The GPUs that this process needs cannot be had; one sentence says what to do."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one (MIG), that CUDA shows to this process."""

    uuid: str
    """32 hex digits, the same in every process and container."""
    visible_as: str
    """What CUDA_VISIBLE_DEVICES calls it here, such as "1"."""


@contextlib.contextmanager
def hold_device(name: str, requested: Literal["auto", "cuda", "cpu"], count: int = 1) -> Iterator[None]:
    """Hold `count` GPUs in this block, and show CUDA no others, here and in the processes that it starts.

    Waits until so many are free, and says once for whom. Nothing is held where `requested` or this machine
    means the CPU, nor by a rank that torchrun started: whoever started it does. To be entered before anything
    asks CUDA whether it is there.

    Args:
        name: of what this process does, such as "train baseline".
        requested: `hardware.device`.

    Raises:
        DeviceLockError: there are fewer GPUs than `count`, or the locks cannot be used.
        Interrupted: a signal came while it waited.
    """
    import torch  # what else is here runs without

    is_rank = "LOCAL_RANK" in os.environ
    if requested == "cpu" or is_rank or torch.version.cuda is None or not (gpus := visible_gpus()):
        yield
        return
    with hold_gpus(name, gpus, count, LOCKS) as held, _visible(",".join(gpu.visible_as for gpu in held)):
        if len(gpus) > 1:
            numbers = ", ".join(gpu.visible_as for gpu in held)
            print(f"{name}: on GPU {numbers} of {len(gpus)}", file=sys.stderr, flush=True)
        yield


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA shows to this process, in CUDA's order; none where there is no driver.

    CUDA shows no process more than one part of a GPU (MIG). So where CUDA_VISIBLE_DEVICES names parts by
    their UUIDs, those are taken from there.
    """
    setting = os.environ.get(_VISIBLE)
    names = None if setting is None else [name.strip() for name in setting.split(",")]
    if names and all(re.fullmatch(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name) for name in names):
        return [Gpu(name.removeprefix("MIG-").replace("-", ""), name) for name in names]
    try:
        listed = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LIST_UUIDS],
            capture_output=True,
            text=True,
            timeout=_LIST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeviceLockError(
            f"the NVIDIA driver did not answer within {_LIST_SECONDS:.0f} s; look at `nvidia-smi`"
        ) from None
    if listed.returncode != 0:
        return []
    uuids = listed.stdout.split()
    return [Gpu(uuid, str(number) if names is None else names[number]) for number, uuid in enumerate(uuids)]


@contextlib.contextmanager
def hold_gpus(name: str, gpus: Sequence[Gpu], count: int, folder: Path) -> Iterator[list[Gpu]]:
    """The first `count` of `gpus` that no process holds; waits until so many are free at once.

    None is held while it waits, so that two who each want several do not wait for each other for ever.

    Args:
        folder: of the locks; made where it is missing.

    Raises:
        DeviceLockError: `gpus` are fewer than `count`, or `folder` cannot be used.
    """
    if count > len(gpus):
        raise DeviceLockError(
            f"training.ranks: {count} processes need a GPU each, and {_names(gpus)}; lower training.ranks"
            + (f", or name more GPUs in {_VISIBLE}" if _VISIBLE in os.environ else "")
        )
    try:
        held, holders = _take(name, gpus, count, folder)
        if not held:
            line = f"{name}: waiting for {_wanted(gpus, count)}; taken by {', '.join(holders)}"
            print(line, file=sys.stderr, flush=True)
        while not held:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            held, _ = _take(name, gpus, count, folder)
    except OSError as error:
        raise DeviceLockError(
            f"{folder}: cannot be used to keep two trainings off one GPU ({error.strerror or error}); make "
            "it a folder that everyone may write, or remove it"
        ) from None
    try:
        yield list(held)
    finally:
        for lock in held.values():
            unlock(lock)


def _take(name: str, gpus: Sequence[Gpu], count: int, folder: Path) -> tuple[dict[Gpu, int], list[str]]:
    """The locks of `count` GPUs; or of none, and in words who holds others."""
    held: dict[Gpu, int] = {}
    holders: list[str] = []
    with _choosing(folder):
        for gpu in gpus:
            path = folder / gpu.uuid
            lock = _open(path)
            if lock_now(lock, path):
                held[gpu] = lock
                if len(held) == count:
                    break
            else:
                holder = read_holder(path)
                holders.append(f"process {holder.pid} ({holder.name})" if holder else "another process")
        if len(held) < count:
            for lock in held.values():
                unlock(lock)
            return {}, list(dict.fromkeys(holders))  # one may hold several
        for lock in held.values():
            with contextlib.suppress(OSError):  # a full disk: held all the same, and nobody knows by whom
                sign(lock, name)
    return held, []


@contextlib.contextmanager
def _choosing(folder: Path) -> Iterator[None]:
    """One at a time, for as long as it takes to look at each lock."""
    with _for_everyone(), contextlib.suppress(FileExistsError):
        folder.mkdir(0o1777)
    lock = _open(folder / _CHOOSING)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _open(path: Path) -> int:
    """Not O_CREAT where it is there: Linux refuses that in /tmp for a file of another user's."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        with _for_everyone(), contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


@contextlib.contextmanager
def _for_everyone() -> Iterator[None]:
    """What is made in this block can be written by other users."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _visible(names: str) -> Iterator[None]:
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = names
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = before


def _wanted(gpus: Sequence[Gpu], count: int) -> str:
    if len(gpus) == 1:
        return "the GPU"
    return f"a GPU of {len(gpus)}" if count == 1 else f"{count} GPUs of {len(gpus)}"


def _names(gpus: Sequence[Gpu]) -> str:
    if _VISIBLE in os.environ:
        return f"{_VISIBLE} shows {len(gpus)}"
    return f"this machine has {len(gpus)}"
