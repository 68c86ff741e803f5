"""Choosing and describing the device."""

from pathlib import Path

import pytest
import torch

from stages.measure import HardwareError, describe_device, measure_matmul_flops_per_second, select_device

CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available() or Path("/dev/nvidia0").exists(), reason="is about machines without a GPU"
)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Puts an nvidia-smi into PATH that reports the given driver."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(version: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho {version}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_cpu_is_always_there() -> None:
    assert select_device("cpu") == CPU


@without_gpu
def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert select_device("auto") == CPU
    with pytest.raises(HardwareError, match=r"no NVIDIA GPU was found.*set hardware.device: auto or cpu"):
        select_device("cuda")


@without_gpu
def test_cuda_asked_of_a_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert select_device("auto") == CPU
    with pytest.raises(HardwareError, match="build for CPUs only"):
        select_device("cuda")


@without_gpu
@pytest.mark.parametrize(
    ("built_for", "found", "needed"), [("13.0", "570.86.15", "580"), ("12.6", "470.82.01", "525")]
)
@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_a_driver_too_old_is_an_error_never_the_cpu(
    requested, built_for, found, needed, driver, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    driver(found)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(HardwareError) as error:
        select_device(requested)
    message = str(error.value)
    assert f"found driver {found}, needed {needed}" in message
    assert "update the driver" in message
    assert "set hardware.device: cpu" in message
    assert select_device("cpu") == CPU


@without_gpu
def test_a_new_driver_that_fails_names_another_cause(driver, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    driver("580.65.06")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(HardwareError, match="new enough, so something else fails"):
        select_device("auto")


@without_gpu
def test_hidden_gpus_are_no_fault(driver, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    driver("470.82.01")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert select_device("auto") == CPU
    with pytest.raises(HardwareError, match="CUDA_VISIBLE_DEVICES is ''"):
        select_device("cuda")


def test_cpu_is_described() -> None:
    device = describe_device(CPU)
    assert device.kind == "cpu" and device.name
    assert device.threads == torch.get_num_threads()
    assert 2**28 < device.memory_bytes < 2**50
    assert device.compute_capability is device.driver_version is device.cuda_version is None


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
def test_matmul_ceiling(precision) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    ceiling = measure_matmul_flops_per_second(CPU, precision, budget_seconds=0.05)
    assert torch.equal(torch.rand(3), expected)  # training's random state is untouched
    assert 1e6 < ceiling.flops_per_second < 1e15
    size = int(ceiling.source.removeprefix("measured ").split("x")[0])
    assert 128 <= size <= 2048
    assert ceiling.source == f"measured {size}x{size}x{size} {precision.removeprefix('amp_')} matmul"
