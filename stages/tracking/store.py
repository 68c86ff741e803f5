"""Where the MLflow runs go: a server named by MLFLOW_TRACKING_URI, else a SQLite file at the root."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from mlflow import MlflowClient

_DEFAULTS = {
    # MLflow's own defaults block the first call to a dead server for 247 s; these for 4 s.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


def project_root() -> Path:
    """DVC's root (in `dvc exp run --temp` that of the real repository), else git's, else the cwd."""
    if root := os.environ.get("DVC_ROOT"):
        return Path(root).resolve()
    here = Path.cwd().resolve()
    for marker in (".dvc", ".git"):
        for folder in (here, *here.parents):
            if (folder / marker).exists():
                return folder
    return here


def work_root() -> Path:
    """The git-ignored folder of everything in progress."""
    return project_root() / ".work"


@dataclass(frozen=True)
class Store:
    """An MLflow tracking store."""

    uri: str
    name: str
    """For messages and for `sent-*.json`: the URI without credentials; for the default store the file's
    name alone, so that a moved repository is still the same store."""
    artifact_location: str | None
    """Where a new experiment keeps its files; None leaves it to the server."""


def store_from_environment(root: Path | None = None) -> Store:
    """The store that MLFLOW_TRACKING_URI names, else `mlflow.db` and `mlartifacts/` at `root`."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return Store(uri, _without_credentials(uri), None)
    root = root or project_root()
    return Store(f"sqlite:///{root / 'mlflow.db'}", "mlflow.db", (root / "mlartifacts").as_uri())


def connect(store: Store) -> "MlflowClient":
    """A client of a store whose schema is there. Takes seconds: mlflow is imported here."""
    set_mlflow_defaults()
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    with _one_at_a_time(store):
        client = MlflowClient(store.uri)
        client.search_experiments(max_results=1)  # the first use creates the schema
    return client


def sqlite_file(store: Store) -> Path | None:
    """The file of a SQLite store, whether it is there or not; None for any other store."""
    if not store.uri.startswith("sqlite:///"):
        return None
    return Path(store.uri.removeprefix("sqlite:///").partition("?")[0])


def set_mlflow_defaults() -> None:
    """Quiet, no telemetry, short waits; what the user has set in the environment stays."""
    for key, value in _DEFAULTS.items():
        os.environ.setdefault(key, value)


@contextlib.contextmanager
def _one_at_a_time(store: Store) -> Iterator[None]:
    """A lock beside a SQLite file: of three processes that create the schema at once two crash."""
    database = sqlite_file(store)
    if database is None:
        yield
        return
    with database.with_name(f".{database.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def in_words(error: Exception) -> str:
    """An error of MLflow's or the network's as one short line; its own run to a thousand characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    for known in ("Connection refused", "timed out", "Name or service not known", "database is locked"):
        if known in text:
            return known[0].lower() + known[1:]
    return text if len(text) <= 200 else text[:199] + "…"


def _without_credentials(uri: str) -> str:
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
