"""The machine that is planned for: whose kernels run, and how much memory a step may need."""

from dataclasses import dataclass
from typing import Literal

from stages.measure.targets import Target, target_of
from stages.memory.kernel_workspaces import attention_splits
from stages.memory.prediction import DEFAULT_COMPUTE_CAPABILITY, DEFAULT_MULTIPROCESSORS
from stages.params import HardwareParams, ModelParams, VariantParams
from stages.training.device_rules import cuda_head_problem
from stages.training.fp8 import fp8_problems
from stages.training.precision import CAPABILITIES


@dataclass(frozen=True)
class Machine:
    """What is planned for; it follows from the params alone."""

    device: Literal["cuda", "cpu"]
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int | None
    """None: there is nothing to fit into."""
    reserve_bytes: int
    target: Target | None

    @property
    def capacity_bytes(self) -> int | None:
        """What a step may need, allowances included."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserve_bytes

    def kernels(self, model: ModelParams, recipe: VariantParams) -> tuple[str, bool, int]:
        """All of it that a prediction depends on.

        Flash attention runs from compute capability 8.0 on, and its backward pass adds up in pieces.
        """
        splits = attention_splits(self.multiprocessors, recipe.micro_batch_size, model.num_attention_heads)
        return self.device, self.compute_capability >= (8, 0), splits

    @property
    def label(self) -> str:
        if self.target is not None:
            return self.target.label
        return "CPU" if self.device == "cpu" else "CUDA GPU"


def machine_of(hardware: HardwareParams) -> Machine:
    """The machine that `hardware` plans for; a CPU where it says nothing else."""
    target = target_of(hardware)
    memory_bytes = target.memory_bytes if target else None
    if hardware.memory_gib is not None:
        memory_bytes = int(hardware.memory_gib * 2**30)
    return Machine(
        "cuda" if target is not None or hardware.device == "cuda" else "cpu",
        target.compute_capability if target else DEFAULT_COMPUTE_CAPABILITY,
        target.multiprocessors if target else DEFAULT_MULTIPROCESSORS,
        memory_bytes,
        int(hardware.memory_reserve_gib * 2**30),
        target,
    )


def unsupported(model: ModelParams, recipe: VariantParams, machine: Machine) -> str | None:
    """Why the machine cannot compute this recipe at all, whatever its memory; None where it can."""
    if machine.device == "cuda" and (problem := cuda_head_problem(model, recipe, machine.compute_capability)):
        return problem
    if recipe.precision == "fp8" and (problems := fp8_problems(model)):
        return f"precision: {'; '.join(problems)}"
    target, needed = machine.target, CAPABILITIES.get(recipe.precision, (0, 0))
    if target is None or target.compute_capability >= needed:
        return None
    found = ".".join(map(str, target.compute_capability))
    instead = "amp_bf16 or fp32" if target.compute_capability >= (8, 0) else "amp_fp16 or fp32"
    return (
        f"precision: {recipe.precision} needs compute capability {needed[0]}.{needed[1]} and {target.label} "
        f"has {found}; use {instead}"
    )
