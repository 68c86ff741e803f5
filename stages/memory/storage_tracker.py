"""Every allocation and release of tensor memory, in the order in which PyTorch's operators make them.

A storage is what holds a tensor's bytes; views share it. Each one is followed from the operator that made it
to the moment its last owner let it go, which a weak reference reports. The tensors may be fake: then nothing
is allocated, and sizes are those that real tensors would have. (`torch.distributed._tools.mem_tracker` does
the same for whole modules; it keeps snapshots and not the sequence of events, of which the make-up of the
peak, the timeline and the allocator's behaviour follow here.)

What an operator allocates inside and frees before it returns cannot be seen from outside. The caller gives
those bytes by `workspace` (kernel_workspaces.py).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE_QUERY = torch.ops.prim.device.default  # fake tensors alone ask, and more often than they compute
_CAST = torch.ops.aten._to_copy.default
_COPY = torch.ops.aten.copy_.default
_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_OWNERS_WHERE_AUTOGRAD_ALONE_HOLDS_IT = (4, 2)
"""Of a tensor and of its storage, as `_is_sum_in_place` counts them: autograd's own and those of the call."""


@dataclass(slots=True)
class Block:
    """One storage or workspace."""

    bytes: int
    place: str
    """Innermost part of the model that was running, such as `attention`; empty outside of all."""
    phase: int
    """Index into `MemoryEvents.phases`."""
    source: int | None = None
    """The block that this is a cast of."""
    returned: bool = False
    """Its bytes were computed before and have come back from the host."""
    gathered: bool = False
    """Weights of which this rank keeps a part."""
    host_bytes: int = 0
    """In host memory, of the trainer's tensors there; then `bytes` is 0."""
    stream: int = 0
    """The stream that it was made on; 0 is that of the model."""
    released_at: int | None = None
    """Index of the event; None: it outlived the recording."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the step."""

    part: str
    """Of the model, such as `block 3 of 12`; empty: all of it."""
    direction: str
    """What is done there, such as `backward`."""
    start: int
    """Index of its first event."""


@dataclass
class MemoryEvents:
    """Allocations and releases in order."""

    blocks: list[Block] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    """`i`: block i was allocated; `~i` (negative): it was released."""
    phases: list["Phase"] = field(default_factory=list)
    """In order of time, the first from event 0 on."""

    def begin(self, part: str, direction: str) -> None:
        """What is allocated from now on belongs to this phase."""
        self.phases.append(Phase(part, direction, len(self.events)))


class StorageTracker(TorchDispatchMode):
    """Records events while it is active; releases also after that, as long as it lives."""

    def __init__(self, workspace: Callable[[Any, tuple[Any, ...], Any], int]):
        """
        Args:
            workspace: (operator, its arguments, its result) to the bytes that it holds beside its result
                at its fullest.
        """
        super().__init__()
        self.on_operator: Callable[[], None] = lambda: None
        """Called before each operator: the moment to begin a phase."""
        self.recorded = MemoryEvents()
        self.places: list[str] = []
        """Where the code is, outermost first."""
        self.on_device = True
        """False: what is allocated now is not in the device's memory and does not count."""
        self.is_paused = False
        """What runs now only finds out shapes."""
        self.with_workspaces = True
        """False: what runs now are steps of a kernel that holds nothing inside."""
        self.subclasses: tuple[type, ...] = ()
        """Types that take their operators apart first: what they do with their parts is seen then."""
        self._streams = {id(torch.cpu.current_stream()): 0}
        self._workspace = workspace
        self._known: dict[int, int] = {}
        """Block of each living storage, by the address of its C++ object: fake ones have no other."""
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping the compiler out costs time at every operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_QUERY:
            return args[0].fake_device
        if self.subclasses and any(issubclass(kind, self.subclasses) for kind in types):
            return NotImplemented
        if self.is_paused:
            return func(*args, **kwargs or {})
        self.on_operator()
        if func is _ADD and _is_sum_in_place(args[0]):
            func = _ADD_IN_PLACE
        result = func(*args, **kwargs or {})
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                block = self._allocate(storage)
                if not self.on_device:
                    block.bytes, block.host_bytes = 0, block.bytes
                if func is _CAST:
                    block.source = self._known.get(args[0].untyped_storage()._cdata)
        if not self.on_device and func is _COPY and (index := self.block_of(args[0])) is not None:
            self.recorded.blocks[index].returned = True
        if self.with_workspaces and (transient := self._workspace(func, args, result)):
            self._record(Block(transient, self._place, len(self.recorded.phases) - 1))
            self._release(len(self.recorded.blocks) - 1)
        return result

    def follow(self, tensor: Tensor, counts: bool = True, on_host: bool = False) -> int:
        """Follow a tensor that no operator made; returns its block's index.

        Args:
            counts: False: its bytes are not of the memory that is looked at.
            on_host: they are of the host's memory.
        """
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            block = self._allocate(storage)
            if on_host:
                block.bytes, block.host_bytes = 0, block.bytes
            block.bytes = block.bytes if counts else 0
        return self._known[storage._cdata]

    @contextmanager
    def storages_resized(self) -> Iterator[None]:
        """Inside, memory that a storage gives back, or has again, without an operator is followed too.

        FSDP2 does so with gathered weights.
        """
        resize = torch.UntypedStorage.resize_

        def resize_and_follow(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized = resize(storage, size)
            before = self._known.pop(storage._cdata, None)
            if before is not None and self._references.pop(before, None) is not None:
                self._release(before)
            if size:
                self._allocate(storage).gathered = True
            return resized

        torch.UntypedStorage.resize_ = resize_and_follow  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def block_of(self, tensor: Tensor) -> int | None:
        """Index of the block that holds a tensor; None where it is not followed."""
        return self._known.get(tensor.untyped_storage()._cdata)

    def stop(self) -> MemoryEvents:
        """No further releases are recorded."""
        self._references.clear()
        return self.recorded

    @property
    def _place(self) -> str:
        return self.places[-1] if self.places else ""

    def _allocate(self, storage: torch.UntypedStorage) -> Block:
        block = Block(storage.nbytes(), self._place, len(self.recorded.phases) - 1)
        block.stream = self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))
        index = self._record(block)
        self._known[storage._cdata] = index
        self._references[index] = weakref.ref(storage, partial(self._released, index, storage._cdata))
        return block

    def _record(self, block: Block) -> int:
        index = len(self.recorded.blocks)
        self.recorded.blocks.append(block)
        self.recorded.events.append(index)
        return index

    def _released(self, index: int, address: int, _: object) -> None:
        del self._known[address]
        if self._references.pop(index, None) is not None:
            self._release(index)

    def _release(self, index: int) -> None:
        self.recorded.blocks[index].released_at = len(self.recorded.events)
        self.recorded.events.append(~index)


def _is_sum_in_place(gradient: Tensor) -> bool:
    """Whether autograd, asked to add another gradient of the same tensor to this one, would write over it.

    It does so where nobody else holds it, but never while an operator can be seen from Python
    (`can_accumulate_inplace` in autograd/input_buffer.cpp), so here the sum arrives as a new tensor. Of a
    tied head's weight that would be one tensor of its size too many.
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    owners = gradient._use_count(), torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return owners == _OWNERS_WHERE_AUTOGRAD_ALONE_HOLDS_IT


def _tensors(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, (tuple, list)):
        return (tensor for item in result for tensor in _tensors(item))
    return ()
