"""The table of GPUs: complete, and without the usual mistakes of data sheets."""

import typing

import pytest

from stages.measure.targets import TARGETS, Target, TargetError, find_target, target_of
from stages.params import HardwareParams, TargetName


def test_every_name_that_params_allow_has_figures() -> None:
    assert {"cpu", *TARGETS} == set(typing.get_args(TargetName))
    assert len(TARGETS) >= 12


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_figures_are_those_of_one_gpu(target: Target) -> None:
    peaks, capability = target.peak_flops_per_second, target.compute_capability
    assert 8e12 <= peaks["fp32"] <= 110e12
    assert ("bf16" in peaks) == ("tf32" in peaks) == (capability >= (8, 0))
    assert ("fp8" in peaks) == (capability >= (8, 9))
    cores = target.multiprocessors * (64 if target.compute_capability in ((7, 5), (8, 0)) else 128)
    assert 1.4e9 < peaks["fp32"] / (2 * cores) < 2.7e9, "a clock"
    assert peaks["fp16"] >= 2 * peaks["fp32"] - 1e12
    if "bf16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]
        # Each narrower format doubles; a figure with sparsity among them would be twice that.
        assert peaks["bf16"] / peaks["tf32"] == pytest.approx(2, rel=0.03)
    if "fp8" in peaks:
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.03)
    assert 250e9 <= target.bytes_per_second <= 8e12


def test_memory_is_what_a_program_can_see() -> None:
    """Less than the GB in the name, which the driver and ECC take their share of."""
    for name, target in TARGETS.items():
        size = name.rpartition("_")[2]
        if size.endswith("gb"):
            assert 0.9 < target.memory_bytes / 2**30 / int(size.removesuffix("gb")) < 1


def test_unknown_names_get_the_nearest() -> None:
    assert find_target("a100_80gb").label == "A100 80 GB"
    with pytest.raises(TargetError, match=r"target rtx4090: no such GPU; did you mean .*rtx_4090"):
        find_target("rtx4090")
    with pytest.raises(TargetError, match=r"no such GPU; known: rtx_3060_12gb, .*, b200"):
        find_target("xyz")


def test_target_of_params() -> None:
    assert target_of(HardwareParams(target="l4")) is TARGETS["l4"]
    assert target_of(HardwareParams(target="cpu", device="cpu")) is None
    assert target_of(HardwareParams(memory_gib=12, device="cuda")) is None
