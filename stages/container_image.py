"""The container image a stage runs in: part of a result's identity, since its compilers and libraries are.

The Dockerfile bakes FRUGAL_BASE_IMAGE, FRUGAL_GIT_COMMIT and FRUGAL_SOURCE into the environment. The digest
of the finished image cannot be known inside of it; who starts the container may say it as
FRUGAL_IMAGE_DIGEST.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


class ContainerImageError(RuntimeError):
    """This image cannot run this checkout; one sentence says what to do."""


@dataclass(frozen=True)
class ContainerImage:
    """What an image is known by."""

    digest: str | None
    """Of the image itself, such as "registry/frugal@sha256:…"; None where nobody said it."""
    base: str
    """The image it was built on, with its digest, such as "python:3.11-slim-bookworm@sha256:…"."""
    constraints_sha256: str
    """Of the constraints.txt whose versions are installed in it."""
    torch: str
    """Its version, with the CUDA it was built for."""
    git_commit: str | None
    """Of the code in it; a checkout that is mounted into the container may have another."""

    @property
    def identity(self) -> str:
        """One line: the digest, else base, pins and build of torch, by which images differ."""
        return self.digest or (
            f"{self.base} with constraints.txt sha256:{self.constraints_sha256} and torch {self.torch}"
        )

    def tags(self) -> dict[str, str]:
        """For an MLflow run."""
        tags = {
            "image": self.identity,
            "image.digest": self.digest,
            "image.base": self.base,
            "image.constraints_sha256": self.constraints_sha256,
            "image.git_commit": self.git_commit,
        }
        return {tag: value for tag, value in tags.items() if value}


def container_image(environment: Mapping[str, str] = os.environ) -> ContainerImage | None:
    """The image this process runs in; None outside of this project's images."""
    base, source = environment.get("FRUGAL_BASE_IMAGE"), environment.get("FRUGAL_SOURCE")
    if not base or not source:
        return None
    return ContainerImage(
        digest=environment.get("FRUGAL_IMAGE_DIGEST") or None,
        base=base,
        constraints_sha256=hashlib.sha256(_constraints(source)).hexdigest(),
        torch=version("torch"),
        git_commit=environment.get("FRUGAL_GIT_COMMIT") or None,
    )


def check_constraints(checkout: Path, environment: Mapping[str, str] = os.environ) -> None:
    """
    Raises:
        ContainerImageError: the image's versions are not those that the checkout's constraints.txt names, so
            results would claim an environment that they do not come from.
    """
    source = environment.get("FRUGAL_SOURCE")
    file = checkout / "constraints.txt"
    if source and file.exists() and file.read_bytes() != _constraints(source):
        raise ContainerImageError(
            f"constraints.txt in {checkout} names other versions than this image has; build the image from "
            "this checkout (docker compose -f docker/compose.yaml build), or check out the commit it was "
            f"built from ({environment.get('FRUGAL_GIT_COMMIT') or 'not recorded'})"
        )


def _constraints(source: str) -> bytes:
    try:
        return (Path(source) / "constraints.txt").read_bytes()
    except OSError as error:
        raise ContainerImageError(
            f"FRUGAL_SOURCE is {source!r}, where the image should keep its code: {error.strerror}; unset it "
            "outside of the image"
        ) from None
