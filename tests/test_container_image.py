"""The image a stage runs in is told in one line, and equal only for equal images."""

import hashlib
import importlib.metadata
from pathlib import Path

import pytest

from stages.container_image import ContainerImageError, container_image

BASE = "python:3.11-slim-bookworm@sha256:" + "a" * 64


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    return {"FRUGAL_BASE_IMAGE": BASE, "FRUGAL_SOURCE": str(tmp_path), "FRUGAL_GIT_COMMIT": "abc123"}


def test_outside_of_an_image_there_is_none() -> None:
    assert container_image({}) is None


def test_without_its_digest_it_is_known_by_base_and_versions(environment: dict[str, str]) -> None:
    image = container_image(environment)
    assert image is not None
    sha256 = hashlib.sha256(b"torch==2.13.0\n").hexdigest()
    torch = importlib.metadata.version("torch")
    assert image.identity == f"{BASE} with constraints.txt sha256:{sha256} and torch {torch}"
    assert image.tags() == {
        "image": image.identity,
        "image.base": BASE,
        "image.constraints_sha256": sha256,
        "image.git_commit": "abc123",
    }


def test_other_versions_are_another_image(environment: dict[str, str], tmp_path: Path) -> None:
    before = container_image(environment)
    (tmp_path / "constraints.txt").write_text("torch==2.14.0\n")
    after = container_image(environment)
    assert before is not None and after is not None and before.identity != after.identity


def test_its_digest_is_its_name_where_somebody_said_it(environment: dict[str, str]) -> None:
    digest = "registry.example.com/frugal@sha256:" + "b" * 64
    image = container_image(environment | {"FRUGAL_IMAGE_DIGEST": digest})
    assert image is not None and image.identity == digest
    assert image.tags()["image.digest"] == digest and image.tags()["image.base"] == BASE


def test_a_source_folder_that_is_not_there_is_said(environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ContainerImageError, match=r"FRUGAL_SOURCE is .*missing.*: No such file"):
        container_image(environment | {"FRUGAL_SOURCE": str(tmp_path / "missing")})
