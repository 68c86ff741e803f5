"""How long a step will take on a GPU that is not here: a range, from counted work and the GPU's ceilings.

A roofline (Williams, Waterman, Patterson 2009): each kind of work takes as long as its FLOPs or its bytes
need, whichever is longer, and the kinds follow one another. It is a forecast, not a measurement. Assumed are:

- matrix products at 35 to 65 % of the dense peak of their format; in fp32, without tensor cores, at 55 to
  90 %. Whole training runs are published at 38 to 58 % of the peak, recomputed FLOPs counted (PaLM, Chowdhery
  et al. 2022; Megatron-LM, Narayanan et al. 2021; Llama 3, 2024);
- what only moves memory (norms, rotary embedding, SwiGLU, the loss, the optimizer, casts) at 60 to 90 % of
  the bandwidth;
- 4 to 8 microseconds of the host for each kernel; the device waits where that is longer than its work;
- bytes as stages/model/llama.py moves them, each tensor read and written once per operation; torch.compile
  halves those of norms, rotary embedding and SwiGLU, and the number of kernels;
- what travels between ranks in a ring, or between GPU and host, at 40 to 85 % of the link's figure (reported
  of nccl-tests: 200 of 300 GB/s on A100, NVIDIA/nccl-tests#149; 28 of 64 on RTX 5090, NVIDIA/nccl#1639); of
  more than eight ranks, at the bandwidth of a machine's network where that is less. At best it hides behind
  what is computed meanwhile, at worst nothing of it does;
- an optimizer in host memory moves its bytes at 40 to 200 GB/s, which the ranks of a machine share.

Attention counts the half under the diagonal, which is what the kernels compute.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from stages.measure.flops import block_matmul_parameters, parameter_count
from stages.measure.targets import Format, Target
from stages.model.loss import HEAD_ELEMENTS, SOFTMAX_ELEMENTS
from stages.params import BlockGroups, MemoryBudget, ModelParams, TrainingParams, VariantParams

TENSOR_CORE_EFFICIENCY = (0.65, 0.35)
FP32_EFFICIENCY = (0.90, 0.55)
BANDWIDTH_EFFICIENCY = (0.90, 0.60)
LAUNCH_SECONDS = (4e-6, 8e-6)
LINK_EFFICIENCY = (0.85, 0.40)
HOST_BYTES_PER_SECOND = (200e9, 40e9)
"""Best and worst case; see the top of this page."""

RANKS_PER_MACHINE = 8

_KERNELS_PER_BLOCK = 70
"""Forward and backward of one block, eager and under autocast, counted; recomputing it adds a third."""
_KERNELS_TO_SHARE_A_BLOCK = 40
"""Copies and collectives that gather its weights twice and cut up its gradients (FSDP2), about."""

_FORMATS: dict[str, Format] = {
    "fp32": "fp32", "tf32": "tf32", "amp_bf16": "bf16", "bf16": "bf16", "amp_fp16": "fp16", "fp8": "bf16",
}  # fmt: skip
"""Of all matrix products; under fp8 of those that stay in 16 bits."""


@dataclass(frozen=True)
class Forecast:
    """Of one variant on one GPU for each rank; every pair is (best case, worst case)."""

    step_seconds: tuple[float, float]
    tokens_per_second: tuple[float, float]
    hours: tuple[float, float]
    """For the whole training.token_budget, compilation and checkpoints left out."""
    cost_per_billion_tokens: tuple[float, float] | None
    """Of all ranks, in the currency of hardware.price_per_hour; None where that is not set."""

    @property
    def middle_tokens_per_second(self) -> float:
        """The geometric middle of the range: what recipes are ranked by."""
        best, worst = self.tokens_per_second
        return float((best * worst) ** 0.5)


def no_forecast_reason(variant: VariantParams, target: Target | None) -> str | None:
    """Why no forecast can be made; None where one can."""
    if target is None:
        return "hardware.target names no GPU, so there are no ceilings to hold the work against"
    if variant.recompute == "offload":
        return "how fast activations go to host memory depends on the machine around the GPU"
    needed = [_FORMATS[variant.precision], *["fp8"] * (variant.precision == "fp8")]
    needed += ["bf16"] * (variant.optimizer == "muon")
    missing = [kind for kind in needed if kind not in target.peak_flops_per_second]
    if missing:
        return f"{target.label} has no fast {missing[0]} matrix products"
    return None


def forecast(
    model: ModelParams,
    vocab_size: int,
    training: TrainingParams,
    variant: VariantParams,
    target: Target,
    price_per_hour: float | None = None,
) -> Forecast:
    """Forecast the speed of a variant on a GPU, or on training.ranks of them.

    Args:
        price_per_hour: of one GPU.

    Raises:
        ValueError: `no_forecast_reason` gives one.
    """
    if (reason := no_forecast_reason(variant, target)) is not None:
        raise ValueError(reason)
    seconds = [_step_seconds(model, vocab_size, training, variant, target, case) for case in (0, 1)]
    tokens = training.global_batch_size * training.sequence_length
    best, worst = ((s, tokens / s, training.num_steps * s / 3600) for s in seconds)
    cost = None
    if price_per_hour is not None:
        price = price_per_hour * training.ranks
        cost = (price * 1e9 / 3600 / best[1], price * 1e9 / 3600 / worst[1])
    return Forecast((best[0], worst[0]), (best[1], worst[1]), (best[2], worst[2]), cost)


def _step_seconds(
    model: ModelParams,
    vocab_size: int,
    training: TrainingParams,
    variant: VariantParams,
    target: Target,
    case: int,
) -> float:
    work = _Work(model, vocab_size, training, variant)
    bandwidth = BANDWIDTH_EFFICIENCY[case] * target.bytes_per_second
    rates = {
        kind: peak * (FP32_EFFICIENCY if kind == "fp32" else TENSOR_CORE_EFFICIENCY)[case]
        for kind, peak in target.peak_flops_per_second.items()
    }
    if "tf32" in rates:  # cuBLAS may take an fp32 kernel for it, and on GeForce the peaks are the same
        rates["tf32"] = max(rates["tf32"], rates["fp32"])
    device = work.moved_bytes / bandwidth
    for kind, flops, moved_bytes in work.products():
        device += max(flops / rates[kind], moved_bytes / bandwidth)
    host = work.kernels * LAUNCH_SECONDS[case]
    micro_batches = work.micro_batches
    optimizer = work.optimizer_bytes / bandwidth
    if work.orthogonalization_flops:
        optimizer += work.orthogonalization_flops / rates["bf16"]
    if variant.parallelism == "fsdp_cpu_offload":
        on_machine = min(training.ranks, RANKS_PER_MACHINE)
        optimizer = work.optimizer_bytes * on_machine / HOST_BYTES_PER_SECOND[case]
    micro_batch = max(device, host)
    # Gradients can hide behind the rest of the last backward pass, which is two thirds of a micro-batch.
    every, last = (
        work.travel_seconds(travel, target, LINK_EFFICIENCY[case])
        for travel in (work.every_travel, work.last_travel)
    )
    hides = 1.0 if case == 0 else 0.0
    waits = micro_batches * max(every - hides * micro_batch, 0.0)
    waits += max(last - hides * max(micro_batch * 2 / 3 - every, 0.0), 0.0)
    return micro_batches * micro_batch + optimizer + waits


@dataclass(frozen=True)
class _Travel:
    """Bytes that go through a rank's links."""

    between_ranks: float = 0.0
    """In a ring, counted once for each time that they are all passed on."""
    to_and_from_host: float = 0.0


@dataclass(frozen=True)
class _Work:
    """What one micro-batch, and the optimizer step after all of them, computes and moves."""

    model: ModelParams
    vocab_size: int
    training: TrainingParams
    variant: VariantParams

    @cached_property
    def tokens(self) -> int:
        return self.variant.micro_batch_size * self.training.sequence_length

    @property
    def micro_batches(self) -> int:
        """Of one rank in one step."""
        return self.variant.accumulation_steps(self.training.global_batch_size, self.training.ranks)

    @property
    def is_mixed(self) -> bool:
        return self.variant.precision in ("amp_bf16", "amp_fp16", "fp8")

    @property
    def stored_bytes(self) -> int:
        """Of a weight, a gradient, a number of the residual stream."""
        return 2 if self.variant.precision == "bf16" else 4

    @property
    def computed_bytes(self) -> int:
        """Of a number that goes into a matrix product."""
        return 4 if self.variant.precision in ("fp32", "tf32") else 2

    @property
    def recomputed_share(self) -> float:
        """Of the blocks' products that are computed a second time."""
        match self.variant.recompute:
            case "every_block":
                return 1.0
            case BlockGroups(every_n_blocks=n):
                return 1.0 / n
            case MemoryBudget(budget=share):
                return 1.0 - share
            case _:
                return 0.0

    @property
    def repeated_share(self) -> float:
        """Of what only moves memory; selective keeps products alone and repeats the rest."""
        return 1.0 if self.variant.recompute == "selective" else self.recomputed_share

    def products(self) -> list[tuple[Format, float, float]]:
        """(format, FLOPs, bytes) of each kind of matrix product, of one micro-batch."""
        model, tokens = self.model, self.tokens
        hidden, kv = model.hidden_size, model.num_key_value_heads * model.head_dim
        blocks = model.num_hidden_layers
        inside: Format = "fp8" if self.variant.precision == "fp8" else _FORMATS[self.variant.precision]
        outside = _FORMATS[self.variant.precision]
        passes = 3 + self.recomputed_share
        shapes = [(hidden, hidden + 2 * kv), (hidden, hidden), (hidden, 2 * model.intermediate_size)]
        shapes.append((model.intermediate_size, hidden))
        found = [
            (inside, blocks * passes * flops, blocks * passes * moved)
            for flops, moved in (self._product(rows, columns) for rows, columns in shapes)
        ]
        flops, moved = self._product(hidden, self.vocab_size)
        found.append((outside, 3 * flops, 3 * moved))
        # Half a square: 2 products forward, 5 backward (flash computes the scores again), 2 recomputed.
        attention = tokens * self.training.sequence_length * hidden * (7 + 2 * self.recomputed_share)
        found.append((outside, blocks * attention, 0.0))
        return found

    def _product(self, rows: int, columns: int) -> tuple[float, float]:
        numbers = self.tokens * (rows + columns) + rows * columns
        return 2.0 * self.tokens * rows * columns, float(numbers * self.computed_bytes)

    @property
    def moved_bytes(self) -> float:
        """By what is no matrix product, of one micro-batch."""
        model, tokens = self.model, self.tokens
        stored, computed = self.stored_bytes, self.computed_bytes
        hidden, feed_forward = model.hidden_size, model.intermediate_size
        queries_and_keys = hidden + model.num_key_value_heads * model.head_dim
        norms = 2 * hidden * (stored + (stored + 4 + computed if self.is_mixed else stored))
        residuals = 2 * hidden * (2 * stored + computed)
        rotary = 8 * queries_and_keys * computed
        swiglu = 5 * feed_forward * computed
        fused = 0.5 if self.variant.compile != "off" else 1.0
        forward = fused * (norms + rotary + swiglu) + residuals
        block = forward * (3 + self.repeated_share)
        # logits written, made fp32, softmax in four passes, its gradient cast back, read twice; caches help
        loss = self.vocab_size * (34 if computed == 2 else 28)
        total = tokens * (model.num_hidden_layers * block + loss + 6 * hidden * stored)
        # Read what is there, read what is new, write the sum.
        if self.micro_batches > 1:
            total += 3 * stored * self.parameters
        if self.is_mixed:  # weights cast to 16 bits, their gradients cast back
            total += 12 * (
                model.num_hidden_layers * block_matmul_parameters(model) + self.vocab_size * hidden
            )
        return float(total)

    @property
    def kernels(self) -> float:
        compiled = 0.5 if self.variant.compile != "off" else 1.0
        per_block = _KERNELS_PER_BLOCK * (1 + self.repeated_share / 3) * compiled
        if self.is_sharded:
            per_block += _KERNELS_TO_SHARE_A_BLOCK
        chunk = self.tokens
        if self.variant.loss == "chunked":
            chunk = min(chunk, self.variant.loss_chunk_tokens)
        softmax_blocks = math.ceil(chunk * self.vocab_size / SOFTMAX_ELEMENTS["cuda"])
        head_pieces = math.ceil(self.vocab_size * self.model.hidden_size / HEAD_ELEMENTS["cuda"])
        per_chunk = 10 + 18 * softmax_blocks + 2 * head_pieces
        return self.model.num_hidden_layers * per_block + math.ceil(self.tokens / chunk) * per_chunk

    @cached_property
    def parameters(self) -> int:
        return parameter_count(self.model, self.vocab_size)

    @property
    def optimizer_bytes(self) -> float:
        """Clipping reads the gradients and scales them; the optimizer reads and writes weights and states."""
        stored = self.stored_bytes
        clipping = 3 * stored if self.training.max_grad_norm is not None else 0
        states = 2 * 2 * (1 if self.variant.optimizer == "adamw_8bit" else stored)
        return float(self.kept_parameters * (clipping + 3 * stored + states))

    @property
    def is_sharded(self) -> bool:
        return self.variant.parallelism != "ddp"

    @property
    def kept_parameters(self) -> float:
        """Of one rank."""
        return self.parameters / self.training.ranks if self.is_sharded else self.parameters

    @property
    def block_parameters(self) -> int:
        return self.model.num_hidden_layers * block_matmul_parameters(self.model)

    @property
    def every_travel(self) -> _Travel:
        """With each micro-batch: weights of the blocks for the forward and for the backward pass, the others
        once."""
        if not self.is_sharded:
            return _Travel()
        rest = self.parameters - self.block_parameters
        gathered = float(2 * self.block_parameters * self.computed_bytes + rest * self.stored_bytes)
        from_host = 0.0
        if self.variant.parallelism == "fsdp_cpu_offload":
            from_host = (2 * self.block_parameters + rest) * self.stored_bytes / self.training.ranks
        return _Travel(gathered, from_host)

    @property
    def last_travel(self) -> _Travel:
        """With the last micro-batch: the gradients."""
        gradients = float(self.parameters * self.stored_bytes)
        if not self.is_sharded:
            return _Travel(2 * gradients)  # summed in parts, and the sums passed on
        is_offloaded = self.variant.parallelism == "fsdp_cpu_offload"
        return _Travel(gradients, gradients / self.training.ranks if is_offloaded else 0.0)

    def travel_seconds(self, travel: _Travel, target: Target, efficiency: float) -> float:
        ranks = self.training.ranks
        link = target.link_bytes_per_second
        if ranks > RANKS_PER_MACHINE:
            # A ring crosses into each machine once, with as many rings as there are network cards.
            link = min(link, target.network_bytes_per_second)
        between_ranks = travel.between_ranks * (ranks - 1) / ranks / (link * efficiency)
        return between_ranks + travel.to_and_from_host / (target.host_bytes_per_second * efficiency)

    @property
    def orthogonalization_flops(self) -> float:
        """Of Muon's five iterations, in bf16: three products each, over every matrix of the blocks."""
        if self.variant.optimizer != "muon":
            return 0.0
        model = self.model
        hidden, kv = model.hidden_size, model.num_key_value_heads * model.head_dim
        sides = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(hidden, model.intermediate_size)] * 3
        flops = sum(2 * (2 * min(pair) ** 2 * max(pair) + min(pair) ** 3) for pair in sides)
        return float(5 * model.num_hidden_layers * flops)
