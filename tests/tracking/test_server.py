"""A real MLflow server that is down at the start, and stopped in the middle of a training."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.tracking.journal import newest_journal
from stages.tracking.store import connect
from stages.tracking.sync import sync

pytestmark = pytest.mark.slow

TRAINER = """
import sys
from pathlib import Path
from stages.tracking import RunTracker, run_tracker, work_root
variant, fingerprint, figure, wait_at_the_end_seconds = sys.argv[1:]
run_tracker._WAIT_AT_THE_END_SECONDS = float(wait_at_the_end_seconds)
with RunTracker(work_root(), variant, fingerprint, "frugal", {"seed": 1, "none": None}) as run:
    for step in range(100):
        if step == 50:
            print("half", flush=True)
            input()
        run.log(step, {"loss": 1 / (1 + step), "not_a_number": float("nan")})
    run.log_artifacts([Path(figure)], "figures")
"""


class Server:
    """`mlflow server` on a free port, which it keeps over restarts."""

    def __init__(self, folder: Path, database: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._database = database
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
        environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1", "--serve-artifacts"]
        options += ["--backend-store-uri", f"sqlite:///{self._database}"]
        options += ["--artifacts-destination", str(self._folder / "files")]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *options],
                env=environment,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        give_up = time.monotonic() + 240
        while not self._is_healthy():
            assert self._process.poll() is None, (self._folder / "server.log").read_text()
            assert time.monotonic() < give_up, (self._folder / "server.log").read_text()
            time.sleep(0.5)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    database = folder / "server.db"
    database.write_bytes(empty_database.read_bytes())
    server = Server(folder, database)
    yield server
    server.stop()


@pytest.fixture
def train(root: Path, server: Server, fingerprint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    (root / "loss.png").write_bytes(b"a figure")

    def start(variant: str, wait_at_the_end_seconds: float) -> subprocess.Popen[str]:
        arguments = [variant, fingerprint, str(root / "loss.png"), str(wait_at_the_end_seconds)]
        return subprocess.Popen(
            [sys.executable, "-c", TRAINER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def only_run(server: Server, variant: str) -> Any:
    client = connect_to(server)
    experiment = client.get_experiment_by_name("frugal")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.variant = '{variant}'")
    return run


def connect_to(server: Server) -> Any:
    from stages.tracking.store import Store

    return connect(Store(server.uri, server.uri, None))


def check_whole(server: Server, variant: str) -> None:
    run, client = only_run(server, variant), connect_to(server)
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(s, 1 / (1 + s)) for s in range(100)]
    assert len(client.get_metric_history(run.info.run_id, "not_a_number")) == 100
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "1", "none": "null"}
    assert [file.path for file in client.list_artifacts(run.info.run_id, "figures")] == ["figures/loss.png"]


def test_down_at_the_start_and_all_the_way(server: Server, train: Any, root: Path, fingerprint: str) -> None:
    server.stop()
    process = train("down", wait_at_the_end_seconds=30)
    _, err = process.communicate("\n")
    assert process.returncode == 0, err
    (warning,) = err.splitlines()
    assert warning == (
        f"tracking: down is not all in {server.uri}: connection refused; training is not affected; "
        "`python -m stages.tracking.sync` sends what is missing"
    )
    journal = newest_journal(root / ".work", "down", fingerprint)
    assert journal is not None
    assert journal.status() == "FINISHED"
    (result,) = sync(root / ".work")
    assert not result.is_complete
    server.start()
    for expected in ("sent, all in", "nothing to send, all in"):
        (result,) = sync(root / ".work")
        assert result.is_complete
        assert result.message.startswith(expected)
        check_whole(server, "down")


def test_stopped_in_the_middle_and_started_again(server: Server, train: Any, root: Path) -> None:
    if not server._is_healthy():
        server.start()
    process = train("middle", wait_at_the_end_seconds=120)
    assert process.stdout.readline() == "half\n"
    give_up = time.monotonic() + 120
    while True:  # the first half is in the UI while the training goes on
        client = connect_to(server)
        found = client.search_runs(
            [e.experiment_id for e in client.search_experiments()],
            "tags.variant = 'middle' and metrics.loss > 0",
        )
        if found:
            break
        assert time.monotonic() < give_up
        time.sleep(0.5)
    assert found[0].info.status == "RUNNING"
    server.stop()
    _, err = process.communicate("\n")
    assert process.returncode == 0, err
    assert "connection refused" in err
    assert len(err.splitlines()) == 1
    server.start()
    (result,) = sync(root / ".work")
    assert result.is_complete
    check_whole(server, "middle")
