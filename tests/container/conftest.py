"""One engine, one build of the image and one MLflow for all tests of this folder."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import pytest

from tests.container.engine import Engine, NoEngineError, container_engine
from tests.pipeline.small_repository import SOURCE, Repository, make_small_repository

STEPS = 600
# Not the developer's docker/.env.
COMPOSE = ("compose", "--env-file=/dev/null", "--file=docker/compose.yaml")


@dataclass(frozen=True)
class Image:
    """As it was built for these tests."""

    tag: str
    commit: str
    base: str | None
    """None: the Dockerfile's own."""


def cannot(reason: str) -> NoReturn:
    """Skip, or fail where a container is required."""
    if os.environ.get("REQUIRE_CONTAINER") == "1":
        pytest.fail(f"REQUIRE_CONTAINER is 1, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(container_engine())
        except NoEngineError as error:
            cannot(str(error))
        yield engine


@pytest.fixture(scope="session")
def image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    try:
        base = engine.base_image()
    except NoEngineError as error:
        cannot(str(error))
    described = ("git", "rev-parse", "HEAD")
    commit = subprocess.run(described, cwd=SOURCE, capture_output=True, text=True, check=True).stdout.strip()
    tag = f"frugal-test:{os.getpid()}"
    given = {"BASE_IMAGE": base} if base else {}
    engine.build(tag, tmp_path_factory.mktemp("build"), GIT_COMMIT=commit, **given)
    yield Image(tag, commit, base)
    engine.run("image", "rm", "--force", tag)


@dataclass(frozen=True)
class Project:
    """A compose project of this checkout's files, beside others on the same engine."""

    engine: Engine
    image: Image
    name: str

    def environment(self, **more: str) -> dict[str, str]:
        # Port 0: a free one.
        return {"FRUGAL_IMAGE": self.image.tag, "COMPOSE_PROJECT_NAME": self.name, "MLFLOW_PORT": "0"} | more

    def compose(
        self, *arguments: str, files: tuple[str, ...] = (), may_fail: bool = False, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        overlays = [f"--file={file}" for file in files]
        return self.engine.run(
            *COMPOSE, *overlays, *arguments, may_fail=may_fail, **self.environment(**environment)
        )

    def mlflow_address(self) -> str:
        return "http://" + self.compose("port", "mlflow", "5000").stdout.strip()


@pytest.fixture(scope="session")
def project(engine: Engine, image: Image) -> Iterator[Project]:
    """MLflow is up and healthy."""
    project = Project(engine, image, f"frugal-test-{os.getpid()}")
    try:
        project.compose("up", "--detach", "--wait", "mlflow")
        yield project
    finally:
        # FRUGAL_FOLDER: its volume is none of the project's otherwise.
        everything = ("down", "--volumes", "--remove-orphans", "--timeout=1")
        project.compose(*everything, may_fail=True, FRUGAL_FOLDER="workspace")


@dataclass(frozen=True)
class Clone:
    """A clone of the project with small params, and the user who runs the pipeline in it."""

    repository: Repository
    project: Project
    user: int

    @property
    def root(self) -> Path:
        return self.repository.root

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """`docker compose run`: it ends with the status of the container."""
        return subprocess.Popen(
            ("docker", *COMPOSE, "run", "--rm", "--no-TTY", "--name", name, *arguments),
            cwd=SOURCE,
            env=self.project.engine.command_environment(**self._environment()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same to its end; both outputs in one."""
        process = self.start(f"{self.project.name}-run", *arguments)
        output, _ = process.communicate(timeout=240)
        return subprocess.CompletedProcess(arguments, process.returncode, output)

    def wait_for_checkpoint(self, running: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 240
        while not any(self.root.glob(".work/train/baseline/*/step-*")):
            assert running.poll() is None, running.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.01)

    def belongs_to(self, user: int, group: int) -> None:
        """The engine's root may do that, also where the test is no root."""
        chown = ("--user=0", "--entrypoint=chown", f"--volume={self.root}:/clone", self.project.image.tag)
        self.project.engine.run("run", "--rm", *chown, "-R", f"{user}:{group}", "/clone")

    def _environment(self) -> dict[str, str]:
        user = str(self.user)
        return self.project.environment(FRUGAL_FOLDER=str(self.root), FRUGAL_UID=user, FRUGAL_GID=user)


@pytest.fixture(scope="session")
def small_clone(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """One variant, 600 steps of a few ms, a checkpoint every 20. Only to be copied."""
    repository = make_small_repository(tmp_path_factory.mktemp("clone") / "repository")

    def edit(params: dict[str, Any]) -> None:
        params["training"] |= {"token_budget": 32 * 4 * STEPS, "log_every_steps": 10}
        params["checkpoints"] = {"every_steps": 20}

    repository.edit_params(edit)
    repository.keep_variants("baseline")
    return repository


class MakeClone(Protocol):
    """A copy of the small clone that belongs to `user`.

    Where it is not `tracked`, a file is in the place of the journals for MLflow: importing mlflow would take
    longer than the training.
    """

    def __call__(self, user: int, *, tracked: bool = False) -> Clone: ...


@pytest.fixture(scope="session")
def make_clone(
    project: Project, small_clone: Repository, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeClone]:
    made = []

    def make(user: int, *, tracked: bool = False) -> Clone:
        clone = Clone(small_clone.copy_to(tmp_path_factory.mktemp("user") / "clone"), project, user)
        if not tracked:
            (clone.root / ".work").mkdir()
            (clone.root / ".work/tracking").touch()
        made.append(clone)
        clone.belongs_to(user, user)
        return clone

    yield make
    for clone in made:  # so that pytest may remove them
        clone.belongs_to(os.getuid(), os.getgid())
