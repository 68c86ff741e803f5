"""The engine's own train step on fake tensors: what it allocates and releases, in order, for a target device.

Model, optimizer, schedule, scaler, recompute and precision are built by stages/training as for a real run,
and two steps are run by its `train_step`: the optimizer's states exist from the second one, whose peak is
the steady one. Fake tensors have shapes and types and no memory, so neither a GPU nor the model's bytes are
needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stages.data.sequences import MicroBatch
from stages.memory.compiled_blocks import compile_blocks
from stages.memory.kernel_workspaces import Target, workspace_bytes
from stages.memory.storage_tracker import MemoryEvents, StorageTracker
from stages.memory.target_kernels import (
    FakeAnswers,
    kernels_of,
    quantization_tables,
    use_cuda_norms,
)
from stages.memory.traced_ranks import (
    TracedParallel,
    TracedRanks,
    fake_group,
    local,
    shapes_unseen,
    weights_on_host,
)
from stages.model.elementwise import RMSNorm
from stages.model.llama import Attention, FeedForward
from stages.params import ModelParams, Params, TokenizerParams, TrainingParams, VariantParams
from stages.training.fp8 import apply_fp8
from stages.training.offload import BlockOffload
from stages.training.parallel import is_sharded
from stages.training.precision import PrecisionPolicy
from stages.training.ranks import Ranks
from stages.training.recompute import apply_recompute
from stages.training.state import TrainState, initial_state
from stages.training.step import train_step

HEAD_AND_LOSS = "head and loss"
FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
CLIPPING, OPTIMIZER_STEP = "gradient clipping", "optimizer step"

_CPU = torch.device("cpu")
_PLACES = {
    Attention: "attention",
    FeedForward: "feed-forward",
    RMSNorm: "norms",
    nn.Embedding: "embedding",
}


@dataclass(frozen=True)
class StepTrace:
    """Allocations and releases, and whose the blocks are that have a name."""

    recorded: MemoryEvents
    """Of both steps, after what is there before the first."""
    second_step: int
    """Its first event."""
    parameters: frozenset[int]
    gradients: frozenset[int]
    """Blocks that were a parameter's gradient at some time."""
    optimizer_state: frozenset[int]
    batch_and_tables: frozenset[int]
    """Token ids, targets, document starts, rotary tables."""


def trace_step(
    model: ModelParams,
    vocab_size: int,
    training: TrainingParams,
    variant: VariantParams,
    target: Target,
    compute_capability: tuple[int, int],
    multiprocessors: int,
) -> StepTrace:
    """Record the second step of a variant."""
    params = _params(model, vocab_size, training, variant)
    tables = quantization_tables() if variant.optimizer == "adamw_8bit" else []
    # An operator without a fake kernel would be tried on real zeros: that is refused.
    fake_mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    with (
        torch.random.fork_rng(devices=[]),
        fake_group(variant, training.ranks),
        kernels_of(target, compute_capability),
        fake_mode,
        FakeAnswers(fake_mode) as answers,
    ):
        return _traced(params, target, multiprocessors, tables, answers)


def _traced(
    params: Params, target: Target, multiprocessors: int, tables: list[Tensor], answers: FakeAnswers
) -> StepTrace:
    variant, training = params.variants[_NAME], params.training
    # One thread of a CPU: a plan follows from the params, whatever machine makes it.
    processors = multiprocessors if target == "cuda" else 1
    tracker = StorageTracker(partial(workspace_bytes, target, processors))
    if is_sharded(variant):
        from torch.distributed.tensor import DTensor

        tracker.subclasses = answers.subclasses = (DTensor,)
    ranks = TracedRanks(0, training.ranks, 0, training.ranks)
    state, policy = _state(params, target, tracker, ranks)
    on_host = variant.parallelism == "fsdp_cpu_offload" and target == "cuda"
    phases = _Phases(tracker, state, optimizer_on_host=on_host)
    micro_batches, waiting = _micro_batches(params)
    # What is compiled is so by now; the step itself would only tell the compiler about its batch.
    eager = variant.model_copy(update={"compile": "off"})
    on_cuda = target == "cuda"  # a CPU's batches are NumPy's, and no tensors of the allocator
    tracker.recorded.begin("", "")
    parameters = {tracker.follow(local(p), on_host=on_host) for p in state.model.parameters()}
    parallel = TracedParallel(state.model, variant, ranks, tracker)
    step = partial(train_step, state, variant=eager, training=training, policy=policy, parallel=parallel)
    batch_and_tables = {tracker.follow(buffer) for buffer in state.model.buffers()}
    batch_and_tables |= {
        tracker.follow(tensor, counts=on_cuda)
        for batch in [*micro_batches, *waiting]
        for tensor in (batch.input_ids_BS, batch.targets_BS, batch.cu_seqlens)
        if tensor is not None
    }
    for table in tables:
        tracker.follow(table)
    weights = weights_on_host(state.model, tracker) if on_host else nullcontext()
    shapes = shapes_unseen(tracker) if is_sharded(variant) else nullcontext()
    with (
        tracker,
        _random_states_followed(tracker, on_device=not on_cuda),
        tracker.storages_resized(),
        shapes,
        weights,
    ):
        step(micro_batches[:1])
        optimizer_state = {tracker.follow(tensor) for tensor in [*_kept_between_steps(state), *tables]}
        second_step = len(tracker.recorded.events)
        phases.gradients.clear()
        tracker.recorded.begin("", "")
        step(micro_batches)
    return StepTrace(
        tracker.stop(),
        second_step,
        frozenset(parameters),
        frozenset(phases.gradients | parallel.gradients),
        frozenset(optimizer_state),
        frozenset(batch_and_tables),
    )


_NAME = "traced"


def _params(model: ModelParams, vocab_size: int, training: TrainingParams, variant: VariantParams) -> Params:
    """What the engine reads of params; nothing else is there."""
    return Params.model_construct(
        seed=0,
        model=model,
        tokenizer=TokenizerParams(vocab_size=vocab_size),
        training=training,
        variants={_NAME: variant},
    )


def _state(
    params: Params, target: Target, tracker: StorageTracker, ranks: Ranks
) -> tuple[TrainState, PrecisionPolicy]:
    """The engine's initial state with precision, recompute and compilation applied.

    A CPU knows no tf32 and no fp8. tf32 is fp32 in memory; fp8 is bf16 autocast and then `apply_fp8`.
    """
    variant = params.variants[_NAME]
    stand_ins = {"tf32": "fp32", "fp8": "amp_bf16"}
    precision = stand_ins.get(variant.precision, variant.precision)
    stand_in = variant.model_copy(update={"precision": precision})
    stood_in = params.model_copy(update={"variants": {_NAME: stand_in}})
    state, policy = initial_state(stood_in, _NAME, _CPU, ranks)
    if variant.precision == "fp8":
        apply_fp8(state.model)
    if target == "cuda":
        # The compiler makes kernels of its own of the norms within blocks.
        fuses_norms = variant.compile != "off" and not is_sharded(variant)
        use_cuda_norms(state.model.norm if fuses_norms else state.model)
    # A block whose weights are gathered by hooks within it is no single graph: it is followed as eager.
    if variant.compile != "off" and not is_sharded(variant):
        with policy.autocast():
            compile_blocks(state.model, variant, tracker, _example(params, policy))
    elif variant.recompute == "offload":
        BlockOffload(_CPU, streams=_HostCopies(tracker)).apply(list(state.model.layers))
    else:
        apply_recompute(state.model, variant)
    return state, replace(policy, name=variant.precision)


def _example(params: Params, policy: PrecisionPolicy) -> tuple[Tensor | None, ...]:
    """Arguments of a block's forward."""
    model, batch = params.model, _micro_batches(params)[0][0]
    rows, positions = batch.input_ids_BS.shape
    x = torch.empty(rows, positions, model.hidden_size, dtype=policy.weights_dtype, requires_grad=True)
    tables = torch.empty(2, positions, model.head_dim, dtype=policy.autocast_dtype or policy.weights_dtype)
    return x, *tables.unbind(), batch.cu_seqlens


def _kept_between_steps(state: TrainState) -> Iterator[Tensor]:
    """What optimizer, schedule and scaler hold, and the counts of the state itself."""
    for entry in state.optimizer.state.values():
        yield from map(local, entry.values())
    for owner in (state, state.optimizer, state.schedule, state.scaler):
        for value in vars(owner).values():
            if isinstance(value, Tensor):
                yield value


@contextmanager
def _random_states_followed(tracker: StorageTracker, on_device: bool) -> Iterator[None]:
    """Recompute keeps the random state of the CPU for each block: 5 kB of tensor that no operator makes."""
    get = torch.get_rng_state

    def get_and_follow() -> Tensor:
        random_state = get()
        tracker.follow(random_state, counts=on_device)
        return random_state

    torch.get_rng_state = get_and_follow  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.get_rng_state = get


class _HostCopies:
    """Streams for BlockOffload: what it allocates on its copy stream are the host's copies."""

    Stream = torch.cpu.Stream
    current_stream = staticmethod(torch.cpu.current_stream)

    def __init__(self, tracker: StorageTracker):
        self._tracker = tracker

    @contextmanager
    def stream(self, _: torch.cpu.Stream) -> Iterator[None]:
        self._tracker.on_device = False
        try:
            yield
        finally:
            self._tracker.on_device = True


def _micro_batches(params: Params) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Those that are run, and those that only wait on the device for their turn.

    The second micro-batch finds the gradients of the first; all further ones find the same as it did.
    """
    variant, training = params.variants[_NAME], params.training
    rows, positions = variant.micro_batch_size, training.sequence_length
    count = variant.accumulation_steps(training.global_batch_size, training.ranks)

    def micro_batch() -> MicroBatch:
        ids, targets = torch.zeros((2, rows, positions), dtype=torch.int64).unbind()
        starts = torch.zeros(rows + 1, dtype=torch.int32) if training.sequences == "packed" else None
        return MicroBatch(ids, targets, starts, rows * positions, rows * positions)

    batches = [micro_batch() for _ in range(count)]
    return batches[:2], batches[2:]


class _Phases:
    """Names the phase and the part of the model that run, for the tracker, from hooks that change nothing."""

    def __init__(self, tracker: StorageTracker, state: TrainState, optimizer_on_host: bool):
        self._optimizer_on_host = optimizer_on_host
        self.gradients: set[int] = set()
        self._tracker = tracker
        self._backward_of = ""
        self._current: tuple[str, str] = ("", "")
        tracker.on_operator = self._on_operator
        model, blocks = state.model, len(state.model.layers)
        self._name(model.embed_tokens, "embedding")
        for number, block in enumerate(model.layers, 1):
            self._name(block, f"block {number} of {blocks}")
        self._name(model.norm, "final norm")
        # Before FSDP2's own hook, which gathers weights.
        model.register_forward_pre_hook(lambda *_: self._begin("", FORWARD), prepend=True)
        model.register_forward_hook(lambda *_: self._begin(HEAD_AND_LOSS, FORWARD))
        for module in model.modules():
            if (place := _PLACES.get(type(module))) is not None:
                module.register_forward_pre_hook(partial(self._enter, place))
                # Recomputation stops early, by an exception, once it has what was asked for.
                module.register_forward_hook(self._leave, always_call=True)
        for parameter in model.parameters():
            parameter.register_hook(self._gradient_arrived)
        state.optimizer.register_step_pre_hook(lambda *_: self._step_begins(model))

    def _name(self, module: nn.Module, name: str) -> None:
        """The module's forward, and the gradients it computes from that of its output, are phases."""

        def after_forward(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            output.register_hook(partial(self._backward_begins, name))

        module.register_forward_pre_hook(lambda *_: self._begin(name, FORWARD))
        module.register_forward_hook(after_forward)

    def _enter(self, place: str, *_: object) -> None:
        self._tracker.places.append(place)

    def _leave(self, *_: object) -> None:
        self._tracker.places.pop()

    def _backward_begins(self, name: str, _: Tensor) -> None:
        self._backward_of = name

    def _gradient_arrived(self, gradient: Tensor) -> None:
        block = self._tracker.block_of(gradient)
        if block is not None:
            self.gradients.add(block)

    def _step_begins(self, model: nn.Module) -> None:
        for parameter in model.parameters():  # parts of gradients, which no hook has seen
            if parameter.grad is not None:
                self._gradient_arrived(local(parameter.grad))
        self._begin("", OPTIMIZER_STEP)

    def _on_operator(self) -> None:
        _, direction = self._current
        if torch._C._current_graph_task_id() != -1:
            if direction in (FORWARD, CLIPPING, OPTIMIZER_STEP, ""):
                self._backward_of = HEAD_AND_LOSS
            # Gradients are computed without recording how, what is recomputed is recorded again.
            self._begin(self._backward_of, RECOMPUTE if torch.is_grad_enabled() else BACKWARD)
        elif direction in (BACKWARD, RECOMPUTE):
            self._begin("", CLIPPING)

    def _begin(self, part: str, direction: str) -> None:
        if (part, direction) != self._current:
            self._current = (part, direction)
            if self._optimizer_on_host:
                self._tracker.on_device = direction not in (CLIPPING, OPTIMIZER_STEP)
            self._tracker.recorded.begin(part, direction)
