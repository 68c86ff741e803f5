"""GPUs held by real processes with real locks. Only what the GPUs are called is made up."""

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stages.device_lock import DeviceLockError, Gpu, hold_device, hold_gpus, visible_gpus

REPOSITORY = Path(__file__).parents[1]

HOLDER = """
import os, sys, time
from pathlib import Path
from stages.device_lock import DeviceLockError, Gpu, hold_gpus
from stages.interruption import run_interruptible

name, names, count, folder = sys.argv[1], sys.argv[2].split(), int(sys.argv[3]), Path(sys.argv[4])
gpus = [Gpu(name * 32, name) for name in names]
{setup}

def run():
    with hold_gpus(name, gpus, count, folder) as held:
        print(*[gpu.visible_as for gpu in held], flush=True)
        {body}
    print("over", flush=True)
    return 0

sys.exit(run_interruptible(name, run))
"""


class Holder:
    def __init__(
        self, folder: Path, name: str, gpus: str, count: int, body: str = "sys.stdin.read()", setup: str = ""
    ) -> None:
        code = HOLDER.format(setup=setup, body=body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, name, gpus, str(count), str(folder)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def held(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def says(self) -> str:
        """Its next line on stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().strip()

    def end(self) -> tuple[int, str, str]:
        """Let it go; its exit status and what it printed since."""
        out, errors = self.process.communicate(timeout=60)
        return self.process.returncode, out, errors

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


Start = Callable[..., Holder]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "gpus"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    holders: list[Holder] = []

    def begin(name: str, gpus: str = "0 1", count: int = 1, **code: str) -> Holder:
        holders.append(Holder(folder, name, gpus, count, **code))
        return holders[-1]

    yield begin
    for holder in holders:
        holder.kill()


def gpus(names: str) -> list[Gpu]:
    return [Gpu(name * 32, name) for name in names.split()]


def test_each_takes_the_first_that_is_free(start: Start) -> None:
    first = start("train baseline")
    assert first.held() == "0"
    second = start("train frugal")
    assert second.held() == "1"
    assert first.end() == (0, "over\n", "")
    third = start("train other")
    assert third.held() == "0"


def test_the_same_gpu_under_another_number_is_the_same(folder: Path, start: Start) -> None:
    assert start("train baseline").held() == "0"
    with hold_gpus("train frugal", [Gpu("0" * 32, "7"), Gpu("1" * 32, "6")], 1, folder) as held:
        assert [gpu.visible_as for gpu in held] == ["6"]


def test_who_finds_none_waits_and_says_once_for_whom(start: Start) -> None:
    first = start("train baseline", "0")
    assert first.held() == "0"
    second = start("train frugal", "0")
    assert (
        second.says() == f"train frugal: waiting for the GPU; taken by process {first.pid} (train baseline)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        second.process.wait(0.8)
    first.end()
    assert second.held() == "0"
    assert second.end() == (0, "over\n", "")


def test_a_killed_holder_frees_it(start: Start) -> None:
    first = start("train baseline", "0")
    assert first.held() == "0"
    second = start("train frugal", "0")
    assert "waiting for the GPU" in second.says()
    first.kill()
    assert second.held() == "0"


def test_a_worker_that_outlives_its_trainer_holds_nothing(start: Start) -> None:
    first = start(
        "train baseline",
        "0",
        body="""
        if (child := os.fork()) == 0:
            time.sleep(60)
        print(child, flush=True)
        sys.stdin.read()
""",
    )
    assert first.held() == "0"
    child = int(first.held())
    try:
        first.process.kill()
        first.process.wait()
        assert start("train frugal", "0").held() == "0"
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_waiting(start: Start, number: signal.Signals) -> None:
    first = start("train baseline", "0")
    assert first.held() == "0"
    second = start("train frugal", "0")
    assert "waiting for the GPU" in second.says()
    second.process.send_signal(number)
    status, out, errors = second.end()
    assert (status, out) == (75, "")
    assert (
        errors == f"train frugal: stopped by {number.name}; it is not complete; `dvc repro` runs it again\n"
    )
    assert start("train other", "0 1").held() == "1", "the first goes on"


def test_several_at_once_are_all_or_none(start: Start) -> None:
    one = start("train one", "0 1 2")
    assert one.held() == "0"
    two = start("train two", "0 1 2", count=2)
    assert two.held() == "1 2"
    again = start("train again", "0 1 2", count=2)
    assert again.says() == (
        f"train again: waiting for 2 GPUs of 3; taken by process {one.pid} (train one), "
        f"process {two.pid} (train two)"
    )
    one.end()
    other = start("evaluate one", "0 1 2")
    assert other.held() == "0", "who waits for two keeps the one that is free from nobody"
    two.end()
    assert again.held() == "1 2"


def test_many_at_once_never_share(folder: Path, start: Start) -> None:
    """Each marks what it holds, several times over; two of them want two of the three at once."""
    folder.mkdir()
    body = """
        pass
    for _ in range(12):
        with hold_gpus(name, gpus, count, folder) as held:
            marks = [folder / f"{gpu.visible_as}.used" for gpu in held]
            for mark in marks:
                mark.touch(exist_ok=False)
            time.sleep(0.002)
            for mark in marks:
                mark.unlink()
"""
    setup = "from stages import device_lock; device_lock._SECONDS_BETWEEN_LOOKS = 0.001"
    holders = [
        start(f"train {number}", "0 1 2", count, body=body, setup=setup)
        for number, count in enumerate([1, 2, 1, 2, 3])
    ]
    for holder in holders:
        status, out, errors = holder.end()
        assert status == 0 and out.endswith("over\n"), errors


def test_more_than_there_are_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    message = "training.ranks: 3 processes need a GPU each, and this machine has 2; lower training.ranks"
    with pytest.raises(DeviceLockError, match=f"^{message}$"), hold_gpus("x", gpus("0 1"), 3, folder):
        pytest.fail("held")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    message = "and CUDA_VISIBLE_DEVICES shows 1; lower .*, or name more GPUs in CUDA_VISIBLE_DEVICES$"
    with pytest.raises(DeviceLockError, match=message), hold_gpus("x", gpus("0"), 2, folder):
        pytest.fail("held")


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text("a file")
    message = rf"^{re.escape(str(tmp_path))}/gpus: cannot be used .*\(Not a directory\); make it a folder"
    with pytest.raises(DeviceLockError, match=message), hold_gpus("x", gpus("0"), 1, tmp_path / "gpus"):
        pytest.fail("held")


def test_other_users_can_lock_and_sign_too(folder: Path) -> None:
    """Whatever the umask of who comes first."""
    before = os.umask(0o077)
    try:
        with hold_gpus("train baseline", gpus("0"), 1, folder):
            pass
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "0" * 32: 0o666,
        "choosing": 0o666,
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
@pytest.mark.parametrize("uids", [(1001, 1002), (0, 1001)])
def test_two_users_wait_for_each_other(uids: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as shared:
        Path(shared).chmod(0o1777)  # as /tmp is
        first = Holder(Path(shared) / "gpus", "train one", "0", 1, setup=f"os.setuid({uids[0]})")
        try:
            assert first.held() == "0"
            second = Holder(Path(shared) / "gpus", "train two", "0", 1, setup=f"os.setuid({uids[1]})")
            try:
                assert f"taken by process {first.pid} (train one)" in second.says()
                first.end()
                assert second.held() == "0"
            finally:
                second.kill()
        finally:
            first.kill()


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A libcuda of two GPUs, as far as `visible_gpus` asks it. No machine of ours has a real one."""
    source = tmp_path / "libcuda.cc"
    source.write_text("""
#include <cstring>
extern "C" {
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int number) { *device = number + 40; return 0; }
int cuDeviceGetUuid_v2(char* uuid, int device) { memset(uuid, device, 16); return 0; }
}
""")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("setting", "names"), [(None, ["0", "1"]), ("3,1", ["3", "1"]), (" GPU-8932 , 1", ["GPU-8932", "1"])]
)
def test_gpus_keep_the_names_that_the_user_gave_them(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, names: list[str]
) -> None:
    if setting is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert visible_gpus() == [Gpu("28" * 16, names[0]), Gpu("29" * 16, names[1])]


def test_parts_of_a_gpu_are_taken_by_the_names_that_the_user_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ["MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-0c757cd7-e942-5726-a0b8-0e8fb7067135"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(parts))
    assert visible_gpus() == [
        Gpu("c6d4f1ef42e45de391c745d71c87eb3f", parts[0]),
        Gpu("0c757cd7e9425726a0b80e8fb7067135", parts[1]),
    ]


def test_without_a_gpu_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    for requested in ("auto", "cuda", "cpu"):
        with hold_device("train baseline", requested):  # type: ignore[arg-type]
            assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

USER = """
import os, sys
from pathlib import Path
from stages import device_lock
device_lock.LOCKS = Path(sys.argv[1])
with device_lock.hold_device("train baseline", "auto"):
    import torch
    uuids = [torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())]
    print(*uuids, flush=True)
    sys.stdin.read()
"""


@pytest.mark.gpu
@NEEDS_CUDA
def test_what_the_driver_lists_is_what_torch_sees() -> None:
    seen = [torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())]
    assert [gpu.uuid for gpu in visible_gpus()] == [str(uuid).replace("-", "") for uuid in seen]


@pytest.mark.gpu
@NEEDS_CUDA
def test_cuda_sees_the_one_that_is_held_and_no_other(folder: Path) -> None:
    *others, last = visible_gpus()
    with contextlib.ExitStack() as stack:
        if others:
            stack.enter_context(hold_gpus("train other", others, len(others), folder))
        ran = subprocess.run(
            [sys.executable, "-c", USER, str(folder)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
    assert ran.stdout.replace("-", "").split() == [last.uuid]
