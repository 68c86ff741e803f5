"""Blocks as torch.compile runs them, on fake tensors and without generating code.

What the compiler changes of memory has two causes. AOTAutograd's partitioner chooses what waits for the
backward pass (`min_cut_rematerialization_partition`): it is called here as the compiler calls it. And
Inductor fuses chains of elementwise operators and reductions into kernels, whose steps in between never are
in memory: here a result that only fused operators read is given no bytes, and what it reads is kept until the
kernel's own result is made. Products and attention are kernels of their own: what they read and give exists.

The blocks alone are treated so, whether `compile` says `blocks` or `model`.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from stages.memory.storage_tracker import StorageTracker
from stages.model.llama import Block, Llama
from stages.params import BlockGroups, MemoryBudget, VariantParams
from stages.training.recompute import _policy

PLACE = "compiled blocks"

_Forward = Callable[..., Tensor]


class _Original(nn.Module):
    """A block with the forward that its class has, whatever the instance was given."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return Block.forward(self.block, *inputs)  # type: ignore[arg-type]


def compile_blocks(
    model: Llama, variant: VariantParams, tracker: StorageTracker, example: Sequence[Tensor | None]
) -> None:
    """Replace the blocks' forward; in place of `apply_recompute` and `apply_compile`.

    Args:
        tracker: told which results are in memory.
        example: arguments of a block's forward, of the types they have under the variant's autocast, which
            must be on.
    """
    original = _Original(model.layers[0])
    every = variant.recompute.every_n_blocks if isinstance(variant.recompute, BlockGroups) else 1
    kinds: dict[bool, _Forward] = {}
    for index, block in enumerate(model.layers):
        recomputed = variant.recompute != "none" and index % every == 0
        parameters = list(block.parameters())
        if recomputed not in kinds:
            kinds[recomputed] = _compiled(original, variant if recomputed else None, tracker)
            with _is_compiling():
                kinds[recomputed](parameters, *example)  # is traced and compiled at its first call
        block.forward = partial(kinds[recomputed], parameters)


@contextmanager
def _is_compiling() -> Iterator[None]:
    """The model takes the formulas that it gives the compiler (stages/model/elementwise.py)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _compiled(original: _Original, variant: VariantParams | None, tracker: StorageTracker) -> _Forward:
    # Imported here: this takes longer than planning an eager variant.
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    names = [name for name, _ in original.named_parameters()]

    def function(parameters: list[Tensor], *inputs: Tensor | None) -> Tensor:
        return torch.func.functional_call(original, dict(zip(names, parameters, strict=True)), inputs)

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        budget = 1.0
        if variant is not None and isinstance(variant.recompute, MemoryBudget):
            budget = variant.recompute.budget
        elif variant is not None:
            _tag(joint.graph, selective=variant.recompute == "selective")
        with config.patch(activation_memory_budget=budget):
            return min_cut_rematerialization_partition(joint, inputs, **options)

    def boxed(graph: fx.GraphModule, _: Any) -> Any:
        interpreter = _Fused(graph, tracker)

        def call(arguments: list[Any]) -> Any:
            tracker.places.append(PLACE)
            try:
                return interpreter.boxed_run(arguments)
            finally:
                interpreter.env.clear()  # or it would hold the results until the next call
                tracker.places.pop()

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return aot_function(
        function,
        fw_compiler=boxed,  # type: ignore[arg-type]
        bw_compiler=boxed,  # type: ignore[arg-type]
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )


def _tag(graph: fx.Graph, selective: bool) -> None:
    """Mark what recompute forgets, as a checkpointed region does that the compiler traces."""
    of_backward: set[fx.Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and "tangent" in node.name
        if is_gradient or not of_backward.isdisjoint(node.all_input_nodes):
            of_backward.add(node)
        elif node.op == "call_function":
            # Of an operator with several results the graph takes each by its index.
            source = node.args[0] if node.target is operator.getitem else node
            kept = selective and _policy(None, source.target) is CheckpointPolicy.MUST_SAVE
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0


class _Fused(fx.Interpreter):
    """Runs a graph; results that a fused kernel keeps to itself have no bytes."""

    def __init__(self, graph: fx.GraphModule, tracker: StorageTracker):
        super().__init__(graph)
        self._tracker = tracker
        self._in_memory = _in_memory(graph.graph)
        self.user_to_last_uses = _last_readers(graph.graph, self._in_memory)

    def run_node(self, n: fx.Node) -> Any:
        self._tracker.on_device = n in self._in_memory
        self._tracker.with_workspaces = not _fuses(n.target)
        try:
            return super().run_node(n)
        finally:
            self._tracker.on_device = self._tracker.with_workspaces = True


def _in_memory(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose results exist: those of kernels of their own, what these read, and the graph's outputs."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            found.update(node.all_input_nodes)
        elif node.op == "call_function":
            if not _fuses(node.target):
                found.add(node)
                found.update(node.all_input_nodes)
            elif node in found and _is_view(node.target):
                found.update(node.all_input_nodes)  # a view exists where its base does
    return found


def _last_readers(graph: fx.Graph, in_memory: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node the ones that nothing reads after it.

    A step within a fused kernel reads when the kernel's result is made, which is later.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    last: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        reads_at = node if node in in_memory or node.op == "output" else last.get(node, node)
        for argument in node.all_input_nodes:
            if argument not in last or position[last[argument]] < position[reads_at]:
                last[argument] = reads_at
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last.items():
        readers.setdefault(reader, []).append(node)
    return readers


def _is_view(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.is_view


_FUSED_THOUGH_NOT_POINTWISE = frozenset(
    f"aten::{name}" for name in ("_to_copy", "cat", "clone", "constant_pad_nd", "full", "mean", "sum")
)


def _fuses(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return (
        torch.Tag.pointwise in target.tags
        or target.is_view
        or target.namespace == "prims"
        or target._schema.name in _FUSED_THOUGH_NOT_POINTWISE
    )
