"""The memory that a training may use, and what to say when it is not enough."""

import torch

from stages.measure.hardware import describe_device
from stages.measure.out_of_memory import FailedAllocation
from stages.measure.units import readable_bytes
from stages.memory.leaner_recipes import DeviceType, leaner_recipes, predicted_peak_bytes
from stages.memory.prediction import CONTEXT_BYTES
from stages.params import Params
from stages.planned import check_device_memory


class DeviceFullError(RuntimeError):
    """A training that does not fit; the message says what would."""


class OverBudgetError(MemoryError):
    """The measured step needed more than --memory-budget allows."""

    def __init__(self, over_bytes: int, budget_bytes: int):
        super().__init__(f"{over_bytes} bytes over the budget of {budget_bytes}")
        self.over_bytes, self.budget_bytes = over_bytes, budget_bytes


def check_memory(
    planned_bytes: int | None, device: torch.device, budget_bytes: int | None, *, sharing: int = 1
) -> None:
    """Refuse at once what is planned for more memory than there is; put the budget in force.

    Args:
        sharing: processes of this training that share a CPU's memory; each needs the same.
    """
    memory_bytes = describe_device(device).memory_bytes
    if budget_bytes is not None:
        if device.type == "cuda":
            # The fraction is of the allocator's memory alone, and a card of this size holds the context too.
            for_tensors = max(budget_bytes - CONTEXT_BYTES, 0)
            torch.cuda.set_per_process_memory_fraction(min(for_tensors / memory_bytes, 1.0), device)
        if planned_bytes is not None and planned_bytes > budget_bytes:
            raise DeviceFullError(
                f"the plan needs {readable_bytes(planned_bytes)} and --memory-budget allows "
                f"{readable_bytes(budget_bytes)}; raise it, or plan for less with hardware.memory_gib"
            )
    if planned_bytes is not None:
        check_device_memory(planned_bytes * (sharing if device.type == "cpu" else 1), memory_bytes)


def out_of_memory_message(
    params: Params, variant: str, device: torch.device, failure: FailedAllocation
) -> str:
    """What was asked for, in use and predicted, and which single changes would need less.

    Takes some seconds: every change is predicted by tracing its step.
    """
    had = failure.in_words()
    try:
        return f"{had}; {_plan_and_advice(params, variant, device, failure.in_use_bytes)}"
    except (RuntimeError, MemoryError):
        # A host that is full itself: tracing a step takes some memory too.
        return f"{had}; use a smaller micro_batch_size, or see what needs less: `python -m stages.plan`"


def _plan_and_advice(params: Params, variant: str, device: torch.device, in_use_bytes: int) -> str:
    recipe = params.variants[variant]
    device_type: DeviceType = "cuda" if device.type == "cuda" else "cpu"
    predicted = predicted_peak_bytes(params, recipe, device_type)
    fits = [
        f"{leaner.change} ({readable_bytes(leaner.peak_bytes)}, "
        f"{'fits' if leaner.peak_bytes < in_use_bytes else 'may not fit'})"
        for leaner in leaner_recipes(params, variant, device_type)
    ]
    advice = f"less would need variants.{variant}.{', or '.join(fits)}" if fits else "use a smaller model"
    return (
        f"the plan predicts a peak of {readable_bytes(predicted)} with micro_batch_size "
        f"{recipe.micro_batch_size}; {advice}"
    )
