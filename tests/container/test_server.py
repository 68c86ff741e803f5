"""The profile `server`: Postgres behind MLflow, with a password and never without.

CONTAINER_POSTGRES_IMAGE names an image that is here, such as that of docker/compose.yaml after a pull.
"""

import json
import os
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.container.conftest import Image, Project
from tests.container.engine import Engine

pytestmark = pytest.mark.slow

PASSWORD = "p@ss w:rd/$x'\"%"
SERVER = "--profile=server"


@pytest.fixture
def server(engine: Engine, image: Image) -> Iterator[Project]:
    """A project of its own, of which nothing runs yet."""
    project = Project(engine, image, f"frugal-test-server-{os.getpid()}")
    yield project
    project.compose(SERVER, "down", "--volumes", "--timeout=1", may_fail=True)


def test_without_a_password_nothing_starts(server: Project) -> None:
    # Any image: it is not started.
    done = server.compose(
        *(SERVER, "up", "--detach", "mlflow"), may_fail=True, POSTGRES_IMAGE=server.image.tag
    )
    assert done.returncode != 0
    assert 'environment variable "POSTGRES_PASSWORD" required' in done.stderr, done
    assert server.compose("ps", "--quiet").stdout == "", "nothing runs, MLflow on SQLite least of all"


def test_a_password_without_postgres_is_no_sqlite(server: Project) -> None:
    server.compose("up", "--detach", "mlflow", POSTGRES_PASSWORD=PASSWORD)
    deadline = time.monotonic() + 30
    while "no Postgres runs here; add --profile server" not in server.compose("logs", "mlflow").stdout:
        assert time.monotonic() < deadline, server.compose("logs", "mlflow").stdout
        time.sleep(0.2)


def test_mlflow_keeps_its_runs_in_postgres(server: Project) -> None:
    postgres = os.environ.get("CONTAINER_POSTGRES_IMAGE")
    if not postgres:
        pytest.skip("CONTAINER_POSTGRES_IMAGE names no image of Postgres")
    given = {"POSTGRES_IMAGE": postgres, "POSTGRES_PASSWORD": PASSWORD}
    server.compose(SERVER, "up", "--detach", "--wait", "mlflow", **given)
    request = urllib.request.Request(
        f"{server.mlflow_address()}/api/2.0/mlflow/experiments/create",
        json.dumps({"name": "kept"}).encode(),
        {"Content-Type": "application/json"},
    )
    assert urllib.request.urlopen(request, timeout=30).status == 200
    ask = ("psql", "--host=127.0.0.1", "--username=mlflow", "--tuples-only", "--no-align")
    query = "select name from experiments where name = 'kept'"
    found = server.compose(
        *(SERVER, "exec", "--no-TTY", f"--env=PGPASSWORD={PASSWORD}", "postgres", *ask, f"--command={query}"),
        **given,
    )
    assert found.stdout == "kept\n"
    assert server.compose("exec", "--no-TTY", "mlflow", "ls", "/var/lib/mlflow").stdout == ""
    processes = server.compose("top", "mlflow").stdout
    assert "postgresql+psycopg2://mlflow@postgres" in processes and PASSWORD not in processes
