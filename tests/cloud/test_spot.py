"""docker/cloud/spot.py: a machine that is taken back, and results that are pushed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from stages.interruption import EXIT_INTERRUPTED
from tests.cloud.metadata_service import command, own_network
from tests.cloud.s3_server import BUCKET, S3Server, s3_server
from tests.pipeline.small_repository import SOURCE, Repository, make_small_repository

SPOT = SOURCE / "docker/cloud/spot.py"
REMOTE = f"s3://{BUCKET}/frugal"
# Many more than a second of training, in which the notice is asked for.
STEPS = 900
_PATIENCE_SECONDS = 400.0


@pytest.fixture(scope="module")
def spot() -> ModuleType:
    specification = importlib.util.spec_from_file_location("spot", SPOT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def network() -> tuple[str, ...]:
    way = own_network()
    if isinstance(way, str):
        pytest.skip(way)
    return way


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


# --- notices ----------------------------------------------------------------------------------------------

_WATCH = f"import runpy; runpy.run_path({str(SPOT)!r})['watch'](print)"


@pytest.mark.parametrize(
    ("cloud", "expected"),
    [
        ("aws", 'AWS: {"action": "terminate", "time": "2026-11-18T08:22:00Z"}'),
        ("google", "Google: preempted"),
        ("azure", "Azure: Preempt, not before Mon, 19 Sep 2026 18:29:47 GMT"),
    ],
)
def test_a_notice_is_heard(network: tuple[str, ...], tmp_path: Path, cloud: str, expected: str) -> None:
    notice = tmp_path / "notice"
    watching = subprocess.Popen(
        command(network, cloud, notice, sys.executable, "-c", _WATCH),
        # A proxy is not asked for the machine's own address.
        env=os.environ | {"http_proxy": "http://127.0.0.1:9"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stderr is not None
    assert f"asking {expected.partition(':')[0]} every second" in watching.stderr.readline()
    time.sleep(0.2)
    assert watching.poll() is None, "no notice yet"
    notice.touch()
    stdout, stderr = watching.communicate(timeout=30)
    assert (stdout.strip(), watching.returncode) == (expected, 0), stderr


def test_a_machine_of_no_cloud_is_told_so(network: tuple[str, ...]) -> None:
    """Nothing answers there: no address, no route."""
    watching = subprocess.Popen(
        [*network, sys.executable, "-c", _WATCH], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert watching.stderr is not None
        assert "only a signal can stop this run in time" in watching.stderr.readline()
    finally:
        watching.kill()
        watching.communicate()


# --- signals ----------------------------------------------------------------------------------------------

# Saves for a second after the first signal, as a trainer does, and writes how many came.
_SAVING = """
import pathlib, signal, sys, time
file, signals = pathlib.Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
file.write_text("ready")
while not signals:
    time.sleep(0.01)
end = time.monotonic() + 1
while time.monotonic() < end:
    time.sleep(0.01)
file.write_text(str(len(signals)))
raise SystemExit(75)
"""


def test_signals_after_a_notice_do_not_cut_the_saving_short(spot: ModuleType, tmp_path: Path) -> None:
    runner, file = spot.Runner(), tmp_path / "signals"

    def take_the_machine() -> None:
        while not (file.exists() and file.read_text() == "ready"):
            time.sleep(0.01)
        runner.machine_is_taken("a test")
        time.sleep(0.2)
        runner.pass_on(signal.SIGTERM, None)

    thread = threading.Thread(target=take_the_machine)
    thread.start()
    assert runner.run(sys.executable, "-c", _SAVING, str(file)) == EXIT_INTERRUPTED
    thread.join()
    assert file.read_text() == "1"
    assert runner.run("sh", "-c", "exit 3") == EXIT_INTERRUPTED, "nothing is begun any more"


def test_an_exit_status_is_that_of_the_command(spot: ModuleType) -> None:
    assert spot.EXIT_INTERRUPTED == EXIT_INTERRUPTED
    runner = spot.Runner()
    assert runner.run("true") == 0
    assert runner.run("sh", "-c", "exit 3") == 3
    assert runner.run("sh", "-c", "kill -KILL $$") == 137


# --- the whole --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remote", "keys", "expected"),
    [
        (REMOTE, {"AWS_SECRET_ACCESS_KEY": "wrong"}, "signature we calculated does not match"),
        (REMOTE, {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
        ("s3://no-such-bucket/frugal", {}, "bucket does not exist"),
    ],
    ids=["wrong secret", "no keys", "no bucket"],
)
def test_a_remote_that_takes_nothing_is_said_before_training(
    server: S3Server, tmp_path: Path, remote: str, keys: dict[str, str], expected: str
) -> None:
    environment = os.environ | server.environment() | {"FRUGAL_DVC_REMOTE": remote} | keys
    done = subprocess.run(
        [sys.executable, str(SPOT)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"FRUGAL_DVC_REMOTE is {remote}, and nothing can be written there: " in done.stderr
    assert expected in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Repository:
    """The checkout on a volume, filled by `frugal` from an "image" whose code is a small repository."""
    image = make_small_repository(tmp_path / "image/repository")

    def edit(params: dict[str, Any]) -> None:
        params["training"] |= {"token_budget": 32 * 4 * STEPS, "log_every_steps": 10}
        params["checkpoints"] = {"every_steps": 50}

    image.keep_variants("baseline")
    image.commit("one variant")
    image.edit_params(edit)
    (image.root / "params.yaml").rename(tmp_path / "params.yaml")
    image.run("git", "checkout", "--quiet", "params.yaml")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "frugal").symlink_to(SOURCE / "docker/frugal.sh")
    checkout = Repository(tmp_path / "volume/frugal")
    subprocess.run(
        ["frugal", "true"], env=_environment(checkout, tmp_path), capture_output=True, text=True, check=True
    )
    # Importing mlflow would take longer than the training.
    (checkout.root / ".work").mkdir()
    (checkout.root / ".work/tracking").write_text("")
    return checkout


def _commands(task: str, home: Path) -> list[str]:
    """As the tool would run them."""
    content = yaml.safe_load((SPOT.parent / task).read_text())
    shell = (
        ["bash", "-c", content["run"]] if "run" in content else ["sh", "-c", " && ".join(content["commands"])]
    )
    assert "/tmp/params.yaml" in shell[-1]
    return [part.replace("/tmp/params.yaml", str(home / "params.yaml")) for part in shell]


def _environment(machine: Repository, home: Path) -> dict[str, str]:
    environment = machine.environment()
    return environment | {
        "PATH": f"{home / 'bin'}{os.pathsep}{environment['PATH']}",
        "HOME": str(home),
        "FRUGAL_CHECKOUT": str(machine.root),
        "FRUGAL_SOURCE": str(home / "image/repository"),
    }


@pytest.mark.slow
def test_a_machine_that_is_taken_back_loses_nothing(
    machine: Repository, network: tuple[str, ...], server: S3Server, tmp_path: Path
) -> None:
    """The commands of both task files, one on the machine that is taken and one on the next."""
    notice, environment = tmp_path / "notice", _environment(machine, tmp_path)
    with (tmp_path / "first").open("w") as output:
        first = subprocess.Popen(
            command(network, "aws", notice, *_commands("task.dstack.yml", tmp_path)),
            env=environment,
            stdout=output,
            stderr=output,
        )
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not any(machine.root.glob(".work/train/baseline/*/step-*")):
            assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "first").read_text()
            time.sleep(0.002)
        notice.touch()
        status = first.wait(_PATIENCE_SECONDS)
    said = (tmp_path / "first").read_text()
    assert status == EXIT_INTERRUPTED, said
    assert 'spot: this machine is being taken back (AWS: {"action": "terminate"' in said
    assert f"of {STEPS}, saved; `dvc repro` goes on from there" in said
    assert not (machine.root / "models/baseline").exists()

    second = subprocess.run(
        _commands("skypilot.yaml", tmp_path),
        env=environment | server.environment() | {"FRUGAL_DVC_REMOTE": REMOTE},
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    assert second.returncode == 0, second
    assert "going on after step" in second.stdout, second
    training = json.loads((machine.root / "models/baseline/training.json").read_text())
    assert training["steps"] == STEPS, "the params of the clone, and not those of the image"

    there = server.objects()
    (run,) = {key.split("/")[2] for key in there if key.startswith("frugal/runs/") and key.endswith(".lock")}
    assert f"in runs/{run}" in second.stderr
    for name in ("dvc.lock", "params.yaml"):
        assert server.read(f"frugal/runs/{run}/{name}") == (machine.root / name).read_bytes()

    # On a third machine: the code, and what was pushed (docs/cloud.md).
    clone = Repository(tmp_path / "elsewhere/clone")
    machine.run("git", "clone", "--quiet", str(tmp_path / "image/repository"), str(clone.root))
    with pytest.MonkeyPatch.context() as account:
        for name, value in server.environment().items():
            account.setenv(name, value)
        for name in ("dvc.lock", "params.yaml"):
            clone.dvc("get-url", "--force", f"{REMOTE}/runs/{run}/{name}")
        clone.dvc("remote", "add", "--default", "storage", REMOTE)
        clone.dvc("pull")
    assert "up to date" in clone.dvc("status")
    weights = "models/baseline/model.safetensors"
    assert (clone.root / weights).read_bytes() == (machine.root / weights).read_bytes()
