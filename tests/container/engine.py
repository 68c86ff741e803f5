"""A container engine for the tests: one that runs, or a private one from a script beside the checkout.

CONTAINER_ENGINE       a script: `SCRIPT start FOLDER` starts an engine and writes FOLDER/env for shells to
                       read, `SCRIPT stop FOLDER` ends it
CONTAINER_BASE_SCRIPT  a script: `SCRIPT TAG` makes an image with Python 3.11 where no registry is reached
CONTAINER_BASE_IMAGE   an image to build on, instead of that
REQUIRE_CONTAINER=1    no engine is a failure
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.pipeline.small_repository import SOURCE

_SCRIPTS = SOURCE.parent / "shared/tools"
_ENGINE_SCRIPT = Path(os.environ.get("CONTAINER_ENGINE", _SCRIPTS / "container-engine.sh"))
_BASE_SCRIPT = Path(os.environ.get("CONTAINER_BASE_SCRIPT", _SCRIPTS / "base-image.sh"))
_LOCAL_BASE = "local/python:3.11"
_ENGINE_BYTES = 12 * 2**30
"""The engine, a base, the image of torch's CPU build and its layers while they are unpacked."""
CANARY = "canary-b3f1c9d2"
"""Is in the secret that the build gets."""
# Nothing of the developer's: what compose and the image would take from the environment.
_STRANGE = ("FRUGAL_", "MLFLOW_", "POSTGRES_", "COMPOSE_", "AWS_", "BASE_IMAGE", "GIT_COMMIT", "HF_TOKEN")


class NoEngineError(RuntimeError):
    """No engine can be had here; says why."""


@dataclass(frozen=True)
class Engine:
    """Runs `docker` with the environment that reaches the engine."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def command_environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in self.environment.items() if not name.startswith(_STRANGE)}
        return kept | more

    def run(
        self, *arguments: str, may_fail: bool = False, timeout: float = 240, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ("docker", *arguments),
            env=self.command_environment(**environment),
            cwd=SOURCE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert may_fail or done.returncode == 0, f"docker {arguments}\n{done.stdout}\n{done.stderr}"
        return done

    def has_compose(self) -> bool:
        try:
            return self.run("compose", "version", may_fail=True).returncode == 0
        except OSError:
            return False

    def answers(self) -> bool:
        try:
            return self.run("version", may_fail=True, timeout=30).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    def base_image(self) -> str | None:
        """To build on; None for the Dockerfile's own.

        Raises:
            NoEngineError: the script cannot make one.
        """
        if image := os.environ.get("CONTAINER_BASE_IMAGE"):
            return image
        if not _BASE_SCRIPT.exists():
            return None
        done = subprocess.run(
            (str(_BASE_SCRIPT), _LOCAL_BASE),
            env=dict(self.environment),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NoEngineError(f"no base image: {done.stderr.strip().splitlines()[-1:]}")
        return _LOCAL_BASE

    def build(self, tag: str, folder: Path, **arguments: str) -> str:
        """Build the checkout's image with this machine's settings of pip; what the builder said."""
        given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        proxies = [f"--build-arg={name}" for name in self.environment if name.lower().endswith("_proxy")]
        command = ("buildx", "build", "--load", "--progress=plain", f"--tag={tag}")
        done = self.run(*command, *given, *proxies, *_pip_options(folder), ".", timeout=1800)
        return done.stderr


@contextmanager
def container_engine() -> Iterator[Engine]:
    """
    Raises:
        NoEngineError: none runs, and none can be started.
    """
    running = Engine()
    if running.answers():
        if not running.has_compose():
            raise NoEngineError("docker has no compose here")
        yield running
        return
    if not _ENGINE_SCRIPT.exists():
        raise NoEngineError("no docker answers here, and CONTAINER_ENGINE names no script that starts one")
    # On memory where there is enough: the engine wants a file system that overlays can be laid upon.
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > _ENGINE_BYTES
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir=memory if has_room else None))
    try:
        started = subprocess.run(
            (str(_ENGINE_SCRIPT), "start", str(folder)), capture_output=True, text=True, check=False
        )
        if started.returncode:
            raise NoEngineError(started.stderr.strip() or f"{_ENGINE_SCRIPT.name} failed")
        # A cancelled run ends by SIGTERM, which would leave the engine behind: as by Ctrl-C, fixtures end.
        previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            yield Engine(_after_reading(folder / "env"))
        finally:
            subprocess.run((str(_ENGINE_SCRIPT), "stop", str(folder)), capture_output=True, check=False)
            signal.signal(signal.SIGTERM, previous)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _after_reading(script: Path) -> dict[str, str]:
    """The environment of a shell that has read `script`."""
    command = ("sh", "-c", '. "$0" && exec "$1" -c "import json, os; print(json.dumps(dict(os.environ)))"')
    done = subprocess.run((*command, str(script), sys.executable), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _pip_options(folder: Path) -> list[str]:
    """What pip needs on this machine, as the Dockerfile takes it: authorities, index, folder of wheels."""
    done = subprocess.run(
        (sys.executable, "-m", "pip", "config", "list"), capture_output=True, text=True, check=True
    )
    settings = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ").split()
    options = []
    authorities = settings.get("cert") or [os.environ.get("SSL_CERT_FILE", "")]
    if Path(authorities[0]).is_file():
        options.append(f"--secret=id=ca,src={authorities[0]}")
    # Folders of this machine are not there in a build: an index in one would only be warned of.
    indexes = {
        key: [value for value in settings.get(key, []) if not value.startswith("file:")]
        for key in ("index-url", "extra-index-url", "trusted-host")
    }
    configuration = folder / "pip.conf"
    lines = [f"{key} = {' '.join(values)}" for key, values in indexes.items() if values]
    configuration.write_text("\n".join(["[global]", *lines, f"# {CANARY}", ""]))
    options.append(f"--secret=id=pip_conf,src={configuration}")
    wheels = [place for place in settings.get("find-links", []) if Path(place).is_dir()]
    if wheels:
        options.append(f"--build-context=wheels={wheels[0]}")
    return options
