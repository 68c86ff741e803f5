import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.tracking import RunTracker
from stages.tracking.store import connect, set_mlflow_defaults, store_from_environment


@pytest.fixture(scope="session", autouse=True)
def quiet_mlflow() -> Iterator[None]:
    before = dict(os.environ)
    set_mlflow_defaults()
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creating the schema takes seconds; each test gets a copy."""
    root = tmp_path_factory.mktemp("empty store")
    connect(store_from_environment(root))
    return root / "mlflow.db"


@pytest.fixture
def root(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own with a store that is ready; the space in its name is on purpose."""
    folder = tmp_path / "my repo"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("DVC_ROOT", str(folder))
    return folder


@pytest.fixture
def no_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sending process cannot start: only the journal is written, and `sync` sends it."""

    def refuse(_: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("stages.tracking.run_tracker.BackgroundSender", refuse)


@pytest.fixture
def fingerprint() -> str:
    return "0123456789abcdef" * 4


@pytest.fixture
def tracker(root: Path, fingerprint: str) -> Any:
    """Makes a RunTracker under the test's root."""

    def make(**changes: Any) -> RunTracker:
        arguments: dict[str, Any] = {
            "work_root": root / ".work",
            "variant": "baseline",
            "fingerprint": fingerprint,
            "experiment": "frugal",
            "params": {"training.learning_rate": 0.004, "variant.compile": "off"},
            "tags": {"device": "cpu"},
        }
        return RunTracker(**arguments | changes)

    return make


@pytest.fixture
def runs(root: Path) -> Any:
    """Reads back the runs of a store, oldest first."""

    def read(experiment: str = "frugal") -> list[Any]:
        client = connect(store_from_environment())
        found = client.get_experiment_by_name(experiment)
        if found is None:
            return []
        return list(client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"]))

    return read


@pytest.fixture
def curve(root: Path) -> Any:
    """Every point of one metric of one run, as the store has it: (step, value)."""

    def read(run: Any, key: str = "loss") -> list[tuple[int, float]]:
        client = connect(store_from_environment())
        return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]

    return read
