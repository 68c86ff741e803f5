"""A variant: one named training recipe, an entry under `variants:`.

The techniques are independent switches. What cannot be combined is refused here, with the reason,
before anything is computed; docs/techniques.md lists the refusals.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer

from stages.params.run import HardwareParams, TrainingParams
from stages.params.section import Section, divisors, one_of

Precision = Literal["fp32", "tf32", "amp_bf16", "amp_fp16", "bf16", "fp8"]


class BlockGroups(Section):
    """`{every_n_blocks: n}`: recompute one transformer block of every n."""

    every_n_blocks: PositiveInt


class MemoryBudget(Section):
    """`{budget: x}`: the compiler keeps this share of the activations and recomputes the rest."""

    budget: Annotated[float, Field(ge=0, le=1)]
    """0 recomputes everything, 1 what costs nothing to recompute."""


def _off_is_a_word(value: Any) -> Any:
    """YAML 1.1 (PyYAML) reads a bare `off` as false; YAML 1.2 (DVC) reads the word."""
    return "off" if value is False else value


class VariantParams(Section):
    """Which techniques are on. Defaults are the plain fp32 recipe."""

    micro_batch_size: PositiveInt
    """Sequences in one forward and backward pass: what memory depends on. The accumulation follows
    from it: training.global_batch_size / micro_batch_size."""
    precision: Precision = "fp32"
    """fp32: IEEE single everywhere. tf32: fp32 storage, matrix products on 19-bit tensor cores
    (NVIDIA Ampere and newer). amp_bf16: fp32 weights, autocast to bfloat16. amp_fp16: autocast to
    float16, which needs a GradScaler because its smallest normal is 6e-5; bfloat16 has fp32's
    range and needs none. bf16: weights, gradients and optimizer states in bfloat16, updates rounded
    stochastically. fp8: matrix products of the blocks in 8 bits (e4m3 forward, e5m2 backward), the
    rest as amp_bf16 (NVIDIA compute capability 8.9 and newer)."""
    recompute: Literal["none", "every_block", "selective", "offload"] | BlockGroups | MemoryBudget = "none"
    """Activation (gradient) checkpointing: forget a block's activations and compute them again in
    the backward pass (Chen et al. 2016). selective keeps the outputs of matrix products and attention.
    {budget: 0..1} lets the compiler choose. offload recomputes nothing: activations wait in host
    memory (CUDA)."""
    compile: Annotated[Literal["off", "blocks", "model"], BeforeValidator(_off_is_a_word)] = "off"
    """torch.compile of each transformer block (one compilation, reused) or of the whole model."""
    loss: Literal["full", "chunked"] = "full"
    """full: the logits of the whole micro-batch stand once, in the type of the matrix products, and their
    gradient is written over them. chunked: the same over chunks of tokens, so that they never all exist."""
    loss_chunk_tokens: Annotated[int, Field(ge=16)] = 512
    """Tokens whose logits exist at one time when loss is chunked. The more, the less often the head's
    gradient is read and written."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw_8bit: AdamW's moments in 8 bits, block by block (Dettmers et al. 2022). muon: momentum made
    orthogonal for the blocks' matrices, AdamW for embeddings, head and norms; it trains otherwise than
    AdamW, not only leaner."""
    parallelism: Literal["ddp", "fsdp", "fsdp_cpu_offload"] = "ddp"
    """How training.ranks share a model. ddp: each has all of it, gradients are summed. fsdp: each keeps its
    part of weights, gradients and optimizer states, and a block's weights are gathered when it is computed
    (FSDP2). fsdp_cpu_offload: that part waits in host memory, where the optimizer steps too; of use to one
    GPU as well."""
    optimizer_in_backward: bool = False
    """Update each parameter as soon as its gradient is there, and free the gradient: all gradients
    never exist at one time."""

    def accumulation_steps(self, global_batch_size: int, ranks: int) -> int:
        """Micro-batches of each rank in one optimizer step."""
        return global_batch_size // (self.micro_batch_size * ranks)

    def problems(self) -> Iterator[tuple[str, str]]:
        if isinstance(self.recompute, MemoryBudget) and self.compile == "off":
            yield (
                "recompute",
                "{budget: …} is carried out by the compiler; set compile: blocks, or use selective",
            )
        if self.recompute == "offload" and self.compile != "off":
            yield (
                "recompute",
                "offload moves tensors as autograd saves them, and a compiled graph saves its own; "
                "set compile: off, or use {budget: …}",
            )
        if self.optimizer == "muon" and self.precision == "bf16":
            yield (
                "optimizer",
                "muon does not round bf16 weights stochastically, and small updates would vanish; use "
                "adamw or adamw_8bit with precision bf16, or muon with amp_bf16",
            )
        if self.optimizer_in_backward:
            if self.precision == "amp_fp16":
                yield (
                    "optimizer_in_backward",
                    "a GradScaler must see all gradients before any update; use amp_bf16 or fp32",
                )
            if self.optimizer == "muon":
                yield ("optimizer_in_backward", "works with adamw and adamw_8bit; muon has two optimizers")
        if self.parallelism != "ddp":
            yield from self._problems_of_sharding()

    def _problems_of_sharding(self) -> Iterator[tuple[str, str]]:
        name = self.parallelism
        if self.optimizer != "adamw":
            needs = "whole matrices" if self.optimizer == "muon" else "blocks of whole rows"
            yield (
                "parallelism",
                f"{name} cuts parameters up and optimizer {self.optimizer} needs {needs}; use adamw, or ddp",
            )
        if self.precision in ("bf16", "fp8"):
            why = "rounds weights stochastically" if self.precision == "bf16" else "scales whole matrices"
            yield (
                "parallelism",
                f"{name} cuts parameters up and precision {self.precision} {why}; use amp_bf16, or ddp",
            )
        if self.precision == "amp_fp16" and name == "fsdp_cpu_offload":
            yield (
                "parallelism",
                "a GradScaler on the GPU cannot scale gradients in host memory; use amp_bf16, or fsdp",
            )
        if self.optimizer_in_backward:
            yield (
                "parallelism",
                f"with {name} a gradient is complete when it was summed, after its backward; "
                "set optimizer_in_backward: false",
            )
        if self.compile == "model":
            yield ("compile", f"{name} gathers weights block by block; use compile: blocks")
        if self.recompute == "offload":
            yield ("recompute", f"offload and {name} would both move what a block needs; use every_block")
        if self.compile == "blocks" and (
            self.recompute == "selective" or isinstance(self.recompute, MemoryBudget)
        ):
            yield (
                "recompute",
                f"with {name} the compiler sees attention and feed-forward, no whole block, so it cannot "
                "choose what to keep of one; use every_block, or compile: off",
            )

    def conflicts(
        self, training: TrainingParams | None, hardware: HardwareParams | None
    ) -> Iterator[tuple[str, str]]:
        """Rules against other sections; None where that section itself could not be read."""
        if training is not None:
            yield from self._conflicts_with_training(training)
        if hardware is not None and hardware.device == "cpu":
            yield from self._conflicts_with_cpu()

    def _conflicts_with_training(self, training: TrainingParams) -> Iterator[tuple[str, str]]:
        ranks = training.ranks
        if training.global_batch_size % ranks:
            return  # `training.ranks` is the problem
        # What one rank has of a global batch.
        global_batch_size = training.global_batch_size // ranks
        whose = "training.global_batch_size" if ranks == 1 else "training.global_batch_size / training.ranks"
        if not isinstance(self.micro_batch_size, int):
            pass  # a VariantToPlan's auto: the plan takes a divisor with which nothing below is broken
        elif global_batch_size % self.micro_batch_size:
            yield (
                "micro_batch_size",
                f"{self.micro_batch_size} does not divide {whose} {global_batch_size}; "
                f"use {one_of(divisors(global_batch_size))}",
            )
        elif self.optimizer_in_backward and global_batch_size > self.micro_batch_size:
            yield (
                "optimizer_in_backward",
                f"micro_batch_size {self.micro_batch_size} accumulates over "
                f"{global_batch_size // self.micro_batch_size} micro-batches, so gradients must be kept; "
                f"use micro_batch_size {global_batch_size}",
            )
        if self.optimizer_in_backward and ranks > 1:
            yield (
                "optimizer_in_backward",
                f"training.ranks is {ranks}, and a gradient is complete only when all ranks' are summed; "
                "switch this off, or use one rank",
            )
        if self.optimizer_in_backward and training.max_grad_norm is not None:
            yield (
                "optimizer_in_backward",
                "clipping by training.max_grad_norm needs all gradients at one time; set it to null for "
                "every variant, or switch this off",
            )

    def _conflicts_with_cpu(self) -> Iterator[tuple[str, str]]:
        needs = {
            "tf32": "is a mode of NVIDIA's tensor cores (compute capability 8.0 or newer)",
            "fp8": "needs NVIDIA's 8-bit tensor cores (compute capability 8.9 or newer)",
        }
        if self.precision in needs:
            yield (
                "precision",
                f"{self.precision} {needs[self.precision]} and hardware.device is cpu; use fp32 or amp_bf16",
            )
        if self.recompute == "offload":
            yield (
                "recompute",
                "offload moves activations from the GPU to host memory and hardware.device is cpu; "
                "use every_block or selective",
            )


class VariantToPlan(VariantParams):
    """A variant that leaves something to the plan: `micro_batch_size: auto`, or `fit: auto`.

    It stands in `Params.variants` until `stages.planned.planned_params` puts the plan's choice, a plain
    VariantParams, in its place. Only the plan may read its `micro_batch_size`.
    """

    micro_batch_size: PositiveInt | Literal["auto"] = "auto"  # type: ignore[assignment]
    """auto: the largest divisor of training.global_batch_size that fits the target's memory."""
    fit: Literal["auto"] | None = None
    """auto: the plan chooses recompute, loss, micro_batch_size and parallelism, as far as they are not given
    here, for the highest forecast speed that fits. It never changes precision, compile or the optimizer."""

    @property
    def given(self) -> dict[str, Any]:
        """The keys that the params file holds and the plan must keep, with their values."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in self.model_fields_set and name != "fit" and getattr(self, name) != "auto"
        }

    def resolved(self, **choice: Any) -> VariantParams:
        """What is given here with the plan's choice for the rest.

        Raises:
            pydantic.ValidationError: `choice` holds something else than a variant's keys and values.
        """
        return VariantParams(**self.given | choice)

    def conflicts(
        self, training: TrainingParams | None, hardware: HardwareParams | None
    ) -> Iterator[tuple[str, str]]:
        yield from super().conflicts(training, hardware)
        if hardware is not None and not hardware.has_capacity:
            key = "fit" if self.fit else "micro_batch_size"
            found = "is cpu, which has no memory of its own" if hardware.target else "names no device"
            yield (
                key,
                f"auto needs a memory to fit into and hardware.target {found}; set hardware.target to a GPU, "
                "such as rtx_4090 or a100_80gb, or set hardware.memory_gib",
            )

    @model_serializer(mode="wrap")
    def _as_written(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A default that was not written is the plan's to choose, also for who reads this again.
        return {key: value for key, value in serialize(self).items() if key in self.model_fields_set}
