"""The GPU overlay asks the engine for every GPU, and the container sees what it was given.

No GPU is needed: a device specification names a device that is none, with an old driver's `nvidia-smi`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.container.conftest import Project, cannot

pytestmark = pytest.mark.slow

OVERLAY = "docker/compose.gpu.yaml"
KIND = "example.com/frugal-test"
DRIVER = "535.183.01"


def test_the_overlay_asks_for_every_gpu(project: Project) -> None:
    project.compose("create", "pipeline", files=(OVERLAY,), FRUGAL_FOLDER="workspace")
    container = project.compose("ps", "--all", "--quiet", "pipeline").stdout.strip()
    asked = json.loads(project.engine.run("inspect", "--format={{json .HostConfig}}", container).stdout)
    project.engine.run("rm", container)
    (request,) = asked["DeviceRequests"]
    assert (request["Driver"], request["Count"], request["Capabilities"]) == ("nvidia", -1, [["gpu"]])
    assert asked["IpcMode"] == "host"
    assert {limit["Name"]: limit["Soft"] for limit in asked["Ulimits"]} == {"memlock": -1, "stack": 2**26}


@pytest.fixture
def device_overlay(project: Project, tmp_path: Path) -> Iterator[str]:
    """The overlay's request, made to a driver that the engine has without NVIDIA's toolkit."""
    asked = project.engine.run("info", "--format={{json .CDISpecDirs}}", may_fail=True)
    folders = json.loads(asked.stdout) if asked.returncode == 0 and asked.stdout.strip() else None
    if not folders:
        cannot("this engine knows no device specifications (CDI)")
    folder, program = Path(folders[-1]), tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho {DRIVER}\n")
    program.chmod(0o755)
    edits = {
        "deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/null", "type": "c"}],
        "mounts": [
            {
                "hostPath": str(program),
                "containerPath": "/usr/bin/nvidia-smi",
                "options": ["ro", "bind"],
            }
        ],
    }
    specification = {
        "cdiVersion": "0.5.0",
        "kind": KIND,
        "devices": [{"name": "all", "containerEdits": edits}],
    }
    file = folder / "frugal-test.json"
    try:
        folder.mkdir(exist_ok=True)
        file.write_text(json.dumps(specification))
    except OSError as error:
        cannot(f"device specifications cannot be written here: {error}")
    overlay = tmp_path / "device.yaml"
    base = yaml.safe_load((Path(__file__).parents[2] / OVERLAY).read_text())
    (device,) = base["services"]["pipeline"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", "all")
    overlay.write_text(
        f"""services:
  pipeline:
    deploy:
      resources:
        reservations:
          devices: !override
            - driver: cdi
              device_ids: [{KIND}=all]
              capabilities: {device["capabilities"]}
    ulimits: !reset null
"""
    )
    yield str(overlay)
    file.unlink()


def test_a_gpu_that_torch_cannot_use_is_no_silent_cpu(project: Project, device_overlay: str) -> None:
    command = """ls /dev/nvidia0 && python -m stages.preflight; echo "auto: status $?"
        sed -i 's/device: auto/device: cuda/' params.yaml; python -m stages.preflight
        echo "cuda: status $?" """
    done = project.compose(
        *("run", "--rm", "--no-TTY", "--no-deps", "--volume=/workspace/frugal", "pipeline", "sh", "-c"),
        command,
        files=(OVERLAY, device_overlay),
        FRUGAL_FOLDER="workspace",
    )
    is_for_cuda = "but torch" in done.stderr
    assert f"auto: status {int(is_for_cuda)}\ncuda: status 1\n" in done.stdout, done
    if is_for_cuda:
        assert f"found driver {DRIVER}, needed 580 or newer" in done.stderr, done
    else:
        assert f"driver: {DRIVER}; WARNING" in done.stdout, done
        assert f"an NVIDIA GPU is here (driver {DRIVER})" in done.stderr, done
