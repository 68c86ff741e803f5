"""What a training may use: the plan against the device, and the budget in force on a CPU."""

from pathlib import Path

import pytest
import torch

from stages.measure.hardware import describe_device
from stages.measure.peak_memory import PeakMemory
from stages.planned import PlanError
from stages.train_memory import DeviceFullError, OverBudgetError, check_memory
from stages.train_run import TrainRun, check_budget
from stages.training.checkpoint_store import CheckpointStore
from tests.training.small_run import small_params

CPU = torch.device("cpu")


def run_with(budget: int | None, folder: Path) -> TrainRun:
    return TrainRun(small_params(), "v", CPU, "", CheckpointStore(folder, 2), 8, folder, budget)


def test_a_plan_for_more_memory_than_there_is() -> None:
    memory = describe_device(CPU).memory_bytes
    check_memory(memory, CPU, None)
    with pytest.raises(PlanError, match="this device has"):
        check_memory(memory + 1, CPU, None)


def test_a_plan_for_more_memory_than_the_budget() -> None:
    check_memory(2**20, CPU, 2**20)
    with pytest.raises(DeviceFullError, match=r"needs 2\.0 MiB and --memory-budget allows 1\.0 MiB"):
        check_memory(2**21, CPU, 2**20)
    check_memory(None, CPU, 2**20)  # without a plan for a device the measured step decides


@pytest.mark.parametrize(("budget", "is_over"), [(None, False), (1000, False), (999, True)])
def test_the_measured_peak_is_held_against_the_budget(
    tmp_path: Path, budget: int | None, is_over: bool
) -> None:
    peak = PeakMemory(1000, "live tensor bytes", None)
    run = run_with(budget, tmp_path)
    check_budget(run, None)  # not measured yet
    if is_over:
        with pytest.raises(OverBudgetError):
            check_budget(run, peak)
    else:
        check_budget(run, peak)


def test_on_a_gpu_all_that_the_allocator_holds_counts(tmp_path: Path) -> None:
    with pytest.raises(OverBudgetError):
        check_budget(run_with(1500, tmp_path), PeakMemory(1000, "cuda", 2000))
