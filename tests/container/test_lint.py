"""Dockerfile, entrypoint and compose files, as far as they can be checked without an engine."""

import importlib.resources
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import sqlalchemy
import yaml

from tests.container.engine import Engine
from tests.pipeline.small_repository import SOURCE

DOCKERFILE = (SOURCE / "Dockerfile").read_text()
COMPOSE_FILES = ("docker/compose.yaml", "docker/compose.gpu.yaml")
BIN = Path(sys.executable).parent


def _load(file: str) -> dict[str, Any]:
    return yaml.safe_load((SOURCE / file).read_text())


@pytest.mark.parametrize("command", [("hadolint", "Dockerfile"), ("shellcheck", "docker/frugal.sh")])
def test_linters_have_nothing_to_say(command: tuple[str, str]) -> None:
    done = subprocess.run(
        (str(BIN / command[0]), command[1]), cwd=SOURCE, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The Compose Specification's own, as check-jsonschema brings it along."""
    folder = importlib.resources.files("check_jsonschema.builtin_schemas.vendor")
    return json.loads((folder / "compose-spec.json").read_text())


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_compose_files_are_of_the_specification(file: str, schema: dict[str, Any]) -> None:
    content = _load(file)
    jsonschema.validate(content, schema)
    content["services"]["pipeline"]["stop_graceperiod"] = "2m"
    with pytest.raises(jsonschema.ValidationError, match="stop_graceperiod"):
        jsonschema.validate(content, schema)


def test_only_mlflow_is_published_and_only_to_this_machine() -> None:
    published = {
        name: service["ports"] for name, service in _load("docker/compose.yaml")["services"].items()
        if "ports" in service or service.get("network_mode")
    }  # fmt: skip
    assert published == {"mlflow": ["${MLFLOW_BIND:-127.0.0.1}:${MLFLOW_PORT:-5000}:5000"]}


def test_mlflow_has_a_driver_for_each_of_its_databases() -> None:
    (command,) = _load("docker/compose.yaml")["services"]["mlflow"]["command"][-1:]
    addresses = re.findall(r"store=(\S+)", command)
    assert [address.partition(":")[0] for address in addresses] == ["sqlite", "postgresql+psycopg2"]
    for address in addresses:
        sqlalchemy.create_engine(address)  # imports the driver


def test_the_build_needs_no_registry_s_frontend() -> None:
    assert not re.search(r"^#\s*syntax\s*=", DOCKERFILE, re.MULTILINE | re.IGNORECASE)
    assert re.search(r"^ARG BASE_IMAGE=python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)


def test_the_image_has_the_version_of_the_project() -> None:
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    assert re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.MULTILINE) == [project["version"]]


def test_torch_s_layer_has_the_pins_of_all_that_torch_needs() -> None:
    """Otherwise pip takes the newest there, and the next layer another."""
    (names,) = re.findall(r"grep -iE '\^\(([^)]*)\)=='", DOCKERFILE)
    known = {name.replace("_", "-") for name in names.split("|")}
    needed, new = set(), {"torch"}
    while new:
        needed |= new
        found = {
            re.match(r"[\w.-]+", line)[0] for name in new for line in requires(name) or [] if ";" not in line
        }  # type: ignore[index]
        new = {name.lower().replace("_", "-") for name in found} - needed
    assert needed <= known


def test_the_image_has_the_code_that_the_pipeline_runs() -> None:
    """.dockerignore names what is taken along."""
    taken = re.findall(r"^!(.+)$", (SOURCE / ".dockerignore").read_text(), re.MULTILINE)
    assert all((SOURCE / path).exists() for path in taken), "nothing that is not there"
    tracked = subprocess.run(("git", "ls-files"), cwd=SOURCE, capture_output=True, text=True, check=True)
    tasks = "".join(path.read_text() for path in (SOURCE / "docker/cloud").iterdir() if path.is_file())
    needed = {"stages", "presets", *re.findall(r"frugal python (\S+\.py)", tasks)}
    assert len(needed) > 2, "what the clouds' tasks start"
    needed |= {*re.findall(r"^[\w.-]+\.(?:yaml|txt|toml)$", tracked.stdout, re.MULTILINE)}
    assert needed - set(taken) <= {"requirements-dev.txt", ".pre-commit-config.yaml"}


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest) -> Engine:
    """Somebody's docker with compose; it need reach no engine."""
    client = Engine()
    return client if client.has_compose() else request.getfixturevalue("engine")


@pytest.mark.slow
@pytest.mark.parametrize("overlays", [(), ("docker/compose.gpu.yaml",)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("profiles", [(), ("--profile=server",)], ids=["sqlite", "postgres"])
def test_compose_reads_them(client: Engine, overlays: tuple[str, ...], profiles: tuple[str, ...]) -> None:
    files = [f"--file={file}" for file in ("docker/compose.yaml", *overlays)]
    done = client.run(
        "compose", "--env-file=/dev/null", *files, *profiles, "config", "--format=json", MLFLOW_PORT="5001"
    )
    config = json.loads(done.stdout)
    assert set(config["services"]) == {"pipeline", "mlflow"} | ({"postgres"} if profiles else set())
    (port,) = config["services"]["mlflow"]["ports"]
    assert (port["host_ip"], port["published"]) == ("127.0.0.1", "5001")
    assert config["services"]["pipeline"]["depends_on"]["mlflow"]["condition"] == "service_healthy"
    (mount, home) = config["services"]["pipeline"]["volumes"]
    assert (mount["type"], mount["source"], home["type"]) == ("bind", str(SOURCE), "volume")
    reservations = (
        config["services"]["pipeline"].get("deploy", {}).get("resources", {}).get("reservations", {})
    )
    assert [device["driver"] for device in reservations.get("devices", [])] == ["nvidia"] * len(overlays)
