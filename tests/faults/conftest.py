"""A small repository with tokens, for tests that run one stage; who changes anything does so in a copy."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.stage_process import results, train
from tests.pipeline.small_repository import Repository, make_small_repository

STEPS = 600


@pytest.fixture(scope="session")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """600 steps of a few ms, a checkpoint every 20. Only to be read.

    A file is in the place of the tracking journals: importing mlflow would take longer than the training.
    """
    repository = make_small_repository(tmp_path_factory.mktemp("tokenized") / "repository")

    def edit(params: dict[str, Any]) -> None:
        params["training"] |= {"token_budget": 32 * 4 * STEPS, "log_every_steps": 10}
        params["checkpoints"] = {"every_steps": 20}

    repository.edit_params(edit)
    repository.run("python", "-m", "stages.tokenize_data")
    shutil.rmtree(repository.root / ".work")  # what tokenizing keeps is no concern of these tests
    (repository.root / ".work").mkdir()
    (repository.root / ".work/tracking").write_text("")
    return repository


@pytest.fixture
def repository(tokenized: Repository, tmp_path: Path) -> Repository:
    """To be changed."""
    return tokenized.copy_to(tmp_path / "repository")


@pytest.fixture(scope="session")
def trained(tokenized: Repository, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """After an uninterrupted training of the baseline. Only to be read."""
    repository = tokenized.copy_to(tmp_path_factory.mktemp("trained") / "repository")
    ended = train(repository, "baseline")
    assert ended.status == 0, ended
    return repository


@pytest.fixture(scope="session")
def uninterrupted(trained: Repository) -> dict[str, str]:
    """The baseline's results, SHA-256 by path."""
    return results(trained.root, "baseline")
