"""One run of the whole pipeline for all tests of this folder; who changes anything does so in a copy."""

from pathlib import Path

import pytest

from tests.pipeline.small_repository import Repository, make_small_repository


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A small repository after `make repro`'s two commands, dvc.lock committed. Only to be read."""
    repository = make_small_repository(tmp_path_factory.mktemp("pipeline") / "repository")
    repository.run("python", "-m", "stages.tracking.initialise")
    repository.repro()
    repository.commit("the first run")
    return repository


@pytest.fixture
def copy(finished: Repository, tmp_path: Path) -> Repository:
    """The finished repository, to be changed."""
    return finished.copy_to(tmp_path / "repository")


@pytest.fixture(scope="session")
def finished_baseline(finished: Repository, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Every variant but the first is removed, compared again and committed. Only to be read."""
    repository = finished.copy_to(tmp_path_factory.mktemp("baseline") / "repository")
    repository.keep_variants("baseline")
    assert repository.repro() == {"compare"}
    repository.commit("one variant")
    return repository


@pytest.fixture
def baseline_only(finished_baseline: Repository, tmp_path: Path) -> Repository:
    """The repository of one variant, to be changed."""
    return finished_baseline.copy_to(tmp_path / "repository")
