"""docker/cloud/: SkyPilot and dstack take these files, and what the files name is in the image."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import botocore
import huggingface_hub
import mlflow
import pytest
import yaml

from stages.interruption import EXIT_INTERRUPTED
from tests.cloud.tools import ROOT, NoToolsError, parse_with_dstack, parse_with_skypilot

CLOUD = ROOT / "docker/cloud"
SKYPILOT = CLOUD / "skypilot.yaml"
TASK, VOLUME, FLEET = (CLOUD / f"{name}.dstack.yml" for name in ("task", "volume", "fleet"))

Verdicts = dict[str, dict[str, Any]]

# What to find, what to put there, and the complaint. Which GPUs and zones there are SkyPilot would have to
# ask the network.
BROKEN_SKYPILOT = {
    "status": ("[75]", "[300]", "300 is greater than the maximum of 255"),
    "recovery": ("recover_on_exit_codes", "recover_on_exit_code", "recover_on_exit_code"),
    "spot": ("use_spot", "use_sport", "did you mean 'use_spot'"),
    "cloud": ("gcp/us", "gpc/us", "'gpc/us-central1/us-central1-a' does not match"),
    "options": ("run_options", "run_option", "did you mean 'run_options'"),
    "nameless disk": ("    name: frugal\n", "", 'must have "name" field'),
    "missing file": ("/tmp/params.yaml: params.yaml", "/tmp/params.yaml: parms.yaml", "parms.yaml"),
}
BROKEN_DSTACK = {
    "spot": (TASK, "spot_policy: spot", "spot_policy: cheap", "spot_policy"),
    "retry": (TASK, "interruption, error", "preemption, error", "on_events"),
    "unknown": (TASK, "image:", "immage:", "immage"),
    "path": (TASK, "frugal:/workspace", "frugal:workspace", "path must be absolute"),
    "memory": (TASK, "shm_size: 8GB", "shm_size: much", "shm_size"),
    "backend": (VOLUME, "backend: aws", "backend: awz", "awz"),
    "region": (VOLUME, "region:", "regoin:", "regoin"),
    "nodes": (FLEET, "nodes: 0..1", "nodes: some", "nodes"),
}


def _parse_all(
    parse: Callable[[list[Path]], list[dict[str, Any]]], good: list[Path], broken: dict[str, Path]
) -> Verdicts:
    try:
        verdicts = parse([*good, *broken.values()])
    except NoToolsError as error:
        if os.environ.get("REQUIRE_CONTAINER") == "1":
            raise
        pytest.skip(str(error))
    return dict(zip([*(path.name for path in good), *broken], verdicts, strict=True))


def _break(folder: Path, name: str, file: Path, found: str, put: str) -> Path:
    text = file.read_text()
    assert text.count(found) >= 1, f"{file.name} has no {found!r} to break"
    path = folder / f"{name.replace(' ', '_')}{''.join(file.suffixes)}"
    path.write_text(text.replace(found, put, 1))
    return path


@pytest.fixture(scope="module")
def skypilot(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    folder = tmp_path_factory.mktemp("skypilot")
    broken = {
        name: _break(folder, name, SKYPILOT, found, put) for name, (found, put, _) in BROKEN_SKYPILOT.items()
    }
    return _parse_all(parse_with_skypilot, [SKYPILOT], broken)


@pytest.fixture(scope="module")
def dstack(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    folder = tmp_path_factory.mktemp("dstack")
    broken = {
        name: _break(folder, name, file, found, put) for name, (file, found, put, _) in BROKEN_DSTACK.items()
    }
    return _parse_all(parse_with_dstack, [TASK, VOLUME, FLEET], broken)


def _parsed(verdicts: Verdicts, path: Path) -> dict[str, Any]:
    verdict = verdicts[path.name]
    assert "parsed" in verdict, verdict
    return verdict["parsed"]


def _checkout() -> PurePosixPath:
    """Where the image keeps the pipeline unless told otherwise."""
    found = re.search(r"^\s+FRUGAL_CHECKOUT=(\S+) \\$", (ROOT / "Dockerfile").read_text(), re.M)
    assert found
    return PurePosixPath(found.group(1))


@pytest.mark.slow
def test_skypilot_restarts_a_stopped_run_on_another_spot_machine(skypilot: Verdicts) -> None:
    task = _parsed(skypilot, SKYPILOT)
    assert task["use_spot"] is True
    assert task["recovery"]["recover_on_exit_codes"] == [EXIT_INTERRUPTED]
    assert task["recovery"]["max_restarts_on_errors"] > 0
    assert task["image"].startswith("docker:")


@pytest.mark.slow
def test_skypilot_keeps_everything_on_one_disk_that_outlives_the_machine(skypilot: Verdicts) -> None:
    task = _parsed(skypilot, SKYPILOT)
    (disk,) = task["volumes"]
    assert disk["storage_type"] == "network" and disk["auto_delete"] is False
    assert disk["attach_mode"] == "read_write" and task["zone"], "a disk is in one zone"
    assert _checkout().is_relative_to(disk["path"])


@pytest.mark.slow
def test_skypilot_gives_its_container_a_user_who_can_install_an_ssh_server(skypilot: Verdicts) -> None:
    assert _parsed(skypilot, SKYPILOT)["run_options"] == ["--user=0:0", "--env=HOME=/root"]


@pytest.mark.slow
def test_dstack_starts_an_interrupted_task_again(dstack: Verdicts) -> None:
    task = _parsed(dstack, TASK)
    assert task["spot_policy"] == "spot"
    # "error" is any exit status but 0, so 75 too.
    assert {"interruption", "error", "no-capacity"} == set(task["retry"]["on_events"])


@pytest.mark.slow
def test_dstack_keeps_everything_on_one_volume(dstack: Verdicts) -> None:
    task, volume = _parsed(dstack, TASK), _parsed(dstack, VOLUME)
    (mount,) = task["volumes"]
    assert mount["name"] == volume["name"] and "instance_path" not in mount
    assert _checkout().is_relative_to(mount["path"])
    assert task["user"] == "root", "a new volume belongs to root"


@pytest.mark.slow
def test_dstack_rents_where_the_volume_is(dstack: Verdicts) -> None:
    task, volume, fleet = (_parsed(dstack, path) for path in (TASK, VOLUME, FLEET))
    assert [entry["name"] for entry in task["fleets"]] == [fleet["name"]]
    assert fleet["backends"] == [volume["backend"]] and fleet["regions"] == [volume["region"]]
    assert fleet["spot_policy"] == task["spot_policy"]
    for resource in ("gpu", "disk"):
        assert fleet["resources"][resource] == task["resources"][resource]


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN_SKYPILOT)
def test_skypilot_refuses_what_is_wrong(skypilot: Verdicts, name: str) -> None:
    assert BROKEN_SKYPILOT[name][-1] in skypilot[name].get("refused", "taken"), skypilot[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN_DSTACK)
def test_dstack_refuses_what_is_wrong(dstack: Verdicts, name: str) -> None:
    assert BROKEN_DSTACK[name][-1] in dstack[name].get("refused", "taken"), dstack[name]


# --- what the files name ----------------------------------------------------------------------------------


def _variables(path: Path) -> set[str]:
    content = yaml.safe_load(path.read_text())
    if "env" in content:
        return {entry.partition("=")[0] for entry in content["env"]}
    return {*content["envs"], *content["secrets"]}


def _commands(path: Path) -> str:
    content = yaml.safe_load(path.read_text())
    return content.get("run") or "\n".join(content["commands"])


def _names_that_are_read() -> str:
    """The text of everything in the image that reads its environment by name."""
    ours = [ROOT / "docker/frugal.sh", CLOUD / "spot.py", *(ROOT / "stages").rglob("*.py")]
    theirs = [
        *(Path(botocore.__file__).parent / name for name in ("configprovider.py", "credentials.py")),
        *(Path(huggingface_hub.__file__).parent / name for name in ("constants.py", "utils/_auth.py")),
        Path(mlflow.__file__).parent / "environment_variables.py",
    ]
    return "\n".join(path.read_text() for path in [*ours, *theirs])


@pytest.mark.parametrize("path", [SKYPILOT, TASK], ids=lambda path: path.name)
def test_every_variable_is_read_by_something_in_the_image(path: Path) -> None:
    read = _names_that_are_read()
    assert len(_variables(path)) > 5
    unread = {name for name in _variables(path) if not re.search(rf"\b{name}\b", read)}
    # botocore puts the name of this one together.
    assert unread <= {"AWS_ENDPOINT_URL"}
    assert "AWS_ENDPOINT_URL" in (ROOT / "docker/compose.yaml").read_text()


def test_both_tasks_hand_on_the_same_variables() -> None:
    assert _variables(SKYPILOT) == _variables(TASK)


@pytest.mark.parametrize("path", [SKYPILOT, TASK], ids=lambda path: path.name)
def test_every_path_in_the_commands_is_in_the_image_or_brought(path: Path) -> None:
    dockerfile, commands = (ROOT / "Dockerfile").read_text(), _commands(path)
    assert "/opt/venv/bin:$PATH" in commands and "PATH=/opt/venv/bin:$PATH" in dockerfile
    assert "/usr/local/bin/frugal" in dockerfile
    (script,) = re.findall(r"frugal python (\S+)$", commands, re.M)
    assert (ROOT / script).is_file()
    assert f"!{script}" in (ROOT / ".dockerignore").read_text().splitlines(), "the image has no such file"
    assert commands.rstrip().splitlines()[-1].startswith("exec "), "a signal ends with the shell"


@pytest.mark.slow
def test_params_come_from_the_clone(skypilot: Verdicts, dstack: Verdicts) -> None:
    """Relative to where it is launched (SkyPilot), and to the file (dstack)."""
    assert "frugal cp /tmp/params.yaml params.yaml" in _commands(SKYPILOT)
    assert Path(_parsed(skypilot, SKYPILOT)["files"]["/tmp/params.yaml"]).resolve() == ROOT / "params.yaml"
    assert "frugal cp /tmp/params.yaml params.yaml" in _commands(TASK)
    (file,) = _parsed(dstack, TASK)["files"]
    assert file["path"] == "/tmp/params.yaml"
    assert (CLOUD / file["local_path"]).resolve() == ROOT / "params.yaml"


@pytest.mark.parametrize("path", [SKYPILOT, TASK], ids=lambda path: path.name)
def test_the_commands_are_a_shell_script(path: Path) -> None:
    done = subprocess.run(["sh", "-n", "-c", _commands(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_secret_is_in_a_file() -> None:
    for path in (SKYPILOT, TASK):
        content = yaml.safe_load(path.read_text())
        values = content.get("secrets") or dict(entry.split("=", 1) for entry in content["env"])
        assert not [
            name for name, value in values.items() if re.search("KEY|SECRET|TOKEN|PASSWORD", name) and value
        ]
