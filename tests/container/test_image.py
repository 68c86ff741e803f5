"""What is in the image, and what is not."""

import json

import pytest

from tests.container.conftest import Image
from tests.container.engine import CANARY, Engine

pytestmark = pytest.mark.slow

# What a build leaves where nobody looks.
_LEFT_BEHIND = (
    *("/root/.cache*", "/etc/pip.conf", "/wheels*", "/pins*", "/run/secrets*", "/tmp/?*", "/var/tmp/?*"),
    *("/home/frugal/?*", "/workspace/frugal/?*", "/var/lib/mlflow/?*", "/opt/frugal/source/.git"),
    *("/var/cache/apt/*.bin", "/var/cache/apt/archives/*.deb", "/var/lib/apt/lists/*_*"),
)


def test_it_is_described_and_runs_as_no_root(engine: Engine, image: Image) -> None:
    config = json.loads(engine.run("inspect", "--format={{json .Config}}", image.tag).stdout)
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert labels["revision"] == image.commit
    assert labels["base.name"] == (image.base or labels["base.name"]) != ""
    assert {"title", "description", "version", "source", "licenses"} <= set(labels)
    assert config["User"].split(":")[0] not in ("", "0", "root")
    assert config["StopSignal"] == "SIGTERM"
    assert "NVIDIA_VISIBLE_DEVICES=all" in config["Env"]
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in config["Env"]


def test_no_secret_and_no_cache_is_left_in_it(engine: Engine, image: Image) -> None:
    history = engine.run("history", "--no-trunc", "--format={{.CreatedBy}}", image.tag).stdout
    assert "constraints" in history and CANARY not in history
    inside = ("run", "--rm", "--user=0", "--entrypoint=find", image.tag)
    paths = " -o ".join(f"-path {path}" for path in _LEFT_BEHIND).split()
    assert engine.run(*inside, "/", "-xdev", "(", *paths, ")").stdout == ""
    containing = ("-type", "f", "-exec", "grep", "-l", CANARY, "{}", "+")
    found = engine.run(*inside, "/etc", "/root", "/run", "/opt/frugal", *containing, may_fail=True)
    assert (found.stdout, found.stderr) == ("", "")
    unreadable = engine.run(
        *inside, "/opt", "(", "-type", "d", "!", "-perm", "-005", "-o", "!", "-perm", "-004", ")"
    )
    assert unreadable.stdout == "", "for users that the image does not know"


def test_every_version_in_it_is_pinned(engine: Engine, image: Image) -> None:
    """But for what torch's builds pin themselves."""
    program = """
import importlib.metadata, pathlib, re
text = pathlib.Path("/opt/frugal/source/constraints.txt").read_text().lower().replace("_", "-")
pins = set(re.findall(r"^[\\w.-]+==[^\\s;]+", text, re.M))
for found in importlib.metadata.distributions():
    pin = (found.name + "==" + found.version.split("+")[0]).lower().replace("_", "-")
    if pin not in pins and not pin.startswith(("pip==", "nvidia-", "cuda-", "triton==")):
        print(pin)
"""
    found = engine.run("run", "--rm", "--entrypoint=python", image.tag, "-c", program)
    assert found.stdout == "", "not in constraints.txt, so another build has another version"
