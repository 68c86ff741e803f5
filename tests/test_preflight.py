"""The preflight says what it found, one line each, and refuses what would end in a slow surprise."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages import preflight
from stages.measure.hardware import Device, describe_device

GPU = Device("cuda", "NVIDIA H200", 8, 2**37, "9.0", "580.65.06", "13.0")
CPU = describe_device(torch.device("cpu"))
MODULE = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sun Jul 27 07:18:44 UTC 2025
GCC version:  gcc version 12.3.0
"""
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\n"


def lines(device: Device = CPU, requested: str = "auto") -> dict[str, str]:
    return dict(line.split(": ", 1) for line in preflight.preflight_lines(device, requested))


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an old driver."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 535.183.01\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_one_line_each() -> None:
    found = lines()
    assert list(found) in (
        ["GPU", "driver", "torch", "/dev/shm", "image"],
        ["GPU", "torch", "/dev/shm", "image"],
    )
    assert found["torch"].startswith(torch.__version__)
    assert found["image"].startswith("none") or "constraints" in found["image"] or "@sha256" in found["image"]


def test_a_gpu_with_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = lines(GPU)
    assert found["GPU"] == "NVIDIA H200, 128.00 GiB, compute capability 9.0"
    assert found["driver"] == "580.65.06"
    assert "unknown" in lines(replace(GPU, driver_version=None))["driver"]


def test_of_several_gpus_it_says_that_one_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert lines(GPU)["GPU"].endswith(", the first of 4")


@pytest.mark.parametrize("module", [MODULE, OPEN_MODULE], ids=["closed", "open"])
@pytest.mark.parametrize("version", ["580.65.06", "535.183"])
def test_the_host_s_driver_is_seen_without_a_gpu(module: str, version: str, tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(module.format(version))
    assert preflight.host_driver_version(file) == version
    file.write_text("something else\n")
    assert preflight.host_driver_version(file) == "of unknown version"
    assert preflight.host_driver_version(tmp_path / "missing") is None


def test_a_gpu_that_was_not_passed_in_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "nvidia_gpu", lambda: (False, None))
    monkeypatch.setattr(preflight, "host_driver_version", lambda: "580.65.06")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = lines()
    assert found["driver"].startswith("580.65.06; WARNING") and "--gpus all" in found["driver"]
    assert "runs on the CPU" in found["GPU"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES is '-1'" in lines()["driver"]
    assert "driver" not in lines(requested="cpu"), "who asks for the CPU is told of no GPU"


def test_a_gpu_that_a_cpu_build_cannot_use_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "host_driver_version", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    put_nvidia_smi(tmp_path, monkeypatch)
    found = lines()
    assert found["GPU"].startswith("none that this process may use; training runs on the CPU")
    assert found["driver"].startswith("535.183.01; WARNING") and "a build for CPUs" in found["driver"]


def test_shared_memory_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "WARNING" not in preflight._shared_memory(tmp_path)  # a disk, larger than a GiB
    # Docker's default.
    small = SimpleNamespace(f_frsize=4096, f_blocks=2**26 // 4096)
    monkeypatch.setattr(preflight.os, "statvfs", lambda folder: small)
    assert preflight._shared_memory(tmp_path).startswith("64.0 MiB; WARNING: small")
    monkeypatch.undo()
    assert preflight._shared_memory(tmp_path / "missing").startswith(
        "none (No such file or directory); WARNING"
    )


def test_params_with_a_mistake_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert preflight.main() == 1
    assert capsys.readouterr().err.startswith("preflight: params.yaml")


def test_an_old_driver_is_refused_with_the_one_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(Path(__file__).parents[1])
    assert preflight.main() == 1
    told = capsys.readouterr().err
    assert "found driver 535.183.01, needed 580 or newer" in told and told.count("\n") == 1
