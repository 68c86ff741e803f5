"""What a rank records, and that torchrun shows it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from stages.rank_process import ERROR_FILE, is_lost_peer, record_failure

REPOSITORY = Path(__file__).parents[1]
PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537]"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{PAIR} Read error [127.0.0.1]:34186: Connection reset by peer."),
        RuntimeError(f"{PAIR} Connection closed by peer [127.0.0.1]:1234"),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms "
            "for recv operation to complete"
        ),
        DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1"),
        DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
        DistBackendError(
            "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error"
        ),
        DistBackendError("NCCL communicator was aborted on rank 0."),
    ],
    ids=lambda error: str(error)[-30:],
)
def test_a_lost_peer_is_known(error: RuntimeError) -> None:
    assert is_lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"[enforce fail at {PAIR[1:-1]}] op.preamble.length <= op.nbytes. 40 vs 16"),
        RuntimeError("Connection reset by peer"),
        ConnectionResetError("Connection reset by peer"),
        DistBackendError("NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, ncclUnhandledCudaError"),
        RuntimeError("CUDA out of memory"),
    ],
    ids=lambda error: str(error)[-30:],
)
def test_another_error_is_no_lost_peer(error: Exception) -> None:
    assert not is_lost_peer(error)


def test_the_first_record_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    record_failure("the cause")
    record_failure("what came of it")
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "the cause"


def test_without_a_launcher_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    record_failure("the plan is missing")
    assert capsys.readouterr() == ("", "rank 1 of 4: the plan is missing\n")


def test_torchrun_calls_the_record_the_root_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the rank that lost it comes first, in number and in time."""
    script = tmp_path / "rank.py"
    script.write_text(
        """
import os, time
from stages.rank_process import leave, leave_for_lost_peer, record_failure
if os.environ["RANK"] == "1":
    record_failure("the loss is not finite")
    leave(1)
leave_for_lost_peer(RuntimeError("Connection closed by peer"), 10)
""",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    root_cause = ran.stderr.partition("Root Cause")[2]
    assert "(local_rank: 1)" in root_cause and "traceback : the loss is not finite\n" in root_cause, ran
    assert 'Traceback (most recent call last):\n  File "' + str(script) not in ran.stderr
