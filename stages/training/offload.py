"""Offload: the activations of a block wait for the backward pass in host memory.

What autograd saves in a block is copied to pinned host memory while the next block computes, and copied
back while the block after it computes its gradients. The GPU then holds the activations of about two
blocks, whatever the number of layers (double buffering by groups of layers, as Transformer Engine's
`cpu_offload.py` does it; torchtune's `OffloadActivations` works tensor by tensor and waits for each copy
back). It pays where a block computes longer than its bytes take over the bus: roughly 25 GB/s each way
on PCIe 4 x16. `torch.autograd.graph.save_on_cpu` does the same copies on the computing stream, where
nothing runs beside them.

Streams, in words. GPU memory is always allocated and freed on the computing stream, so its allocator
never gives a block away too early, and `record_stream` is not needed:
- to host: the copy stream waits for the compute stream, copies, records `copied`; the block's GPU memory
  is let go after the next block, when the compute stream has waited for `copied`;
- back: memory is taken on the compute stream, the copy stream waits for it (kernels queued earlier may
  still read what was there before), copies, records `arrived`; the compute stream waits for `arrived`
  before the block's first gradient.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DEFAULT_MIN_BYTES = 256 * 1024
"""Below this a copy costs more in launch time (about 10 microseconds) than in transfer."""


class BlockOffload:
    """Gives a chain of blocks forwards whose saved activations wait in host memory.

    The copying knows streams only through `torch.get_device_module(device)`, whose CPU streams do
    nothing: on a CPU the same code runs with plain host copies, which is how it is tested.
    """

    def __init__(self, device: torch.device, *, min_bytes: int = DEFAULT_MIN_BYTES, streams: Any = None):
        """
        Args:
            device: where the blocks compute.
            min_bytes: smaller storages stay where they are.
            streams: a module with `Stream`, `current_stream` and `stream`; that of `device` if None.
        """
        self.device = device
        self.min_bytes = min_bytes
        self.streams = torch.get_device_module(device) if streams is None else streams
        self.copy_stream = self.streams.Stream()
        self._last: _Bag | None = None

    def apply(self, blocks: Sequence[nn.Module]) -> None:
        """Replace the forward of each block; they must run in this order.

        The first argument of a block is the activation; the others (rotary tables, document starts) are
        shared by all blocks and stay. So do parameters, buffers and views of them.
        """
        for index, block in enumerate(blocks):
            first, last = index == 0, index == len(blocks) - 1
            block.forward = self._offloaded(block, block.forward, first, last)

    def _offloaded(
        self, block: nn.Module, forward: Callable[..., Tensor], first: bool, last: bool
    ) -> Callable[..., Tensor]:
        def offloaded_forward(x: Tensor, *shared: Tensor | None) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(x, *shared)
            previous = None if first else self._last
            # The last block's gradients come first of all: what it saves is needed at once.
            bag = _Bag(self, previous, _addresses(block, shared), stays=last)
            self._last = bag
            with torch.autograd.graph.saved_tensors_hooks(bag.pack, _unpack):
                out = forward(x, *shared)
            bag.send()
            if previous is not None:
                previous.let_go()
            if last:
                self._last = None
            return out

        return offloaded_forward


class _Bag:
    """What one block saved in one forward pass."""

    def __init__(self, offload: BlockOffload, previous: "_Bag | None", shared: set[int], stays: bool):
        self.offload = offload
        self.previous = previous
        """That of the block before, whose gradients come after this one's."""
        self.shared = shared
        self.stays = stays
        # Autograd alone keeps the slots alive, each as long as a node still needs it: memory that came
        # back is free again after its last use, not at the end of the block. An address stands for a
        # storage only while its slot lives, so that one used again is never taken for the old one.
        self.slots: weakref.WeakValueDictionary[int, _Slot] = weakref.WeakValueDictionary()
        self.copied: Any = None
        self.arrived: Any = None
        self.waited_for_arrival = False

    def pack(self, tensor: Tensor) -> "Tensor | _Saved":
        storage = tensor.untyped_storage()
        if (
            tensor.device.type != self.offload.device.type
            or storage.nbytes() < self.offload.min_bytes
            or storage.data_ptr() in self.shared
        ):
            return tensor
        slot = self.slots.get(storage.data_ptr())
        if slot is None:  # two nodes often save one storage, as views of other shapes: it goes once
            slot = _Slot(storage, fixed=self.stays)
            self.slots[storage.data_ptr()] = slot
        return _Saved(self, slot, tensor)

    @torch.no_grad()
    def send(self) -> None:
        """Start the copies to the host; the GPU's bytes stay until `let_go`."""
        offload, slots = self.offload, [slot for slot in self.slots.values() if not slot.fixed]
        if not slots:
            return
        offload.copy_stream.wait_stream(offload.streams.current_stream())
        with offload.streams.stream(offload.copy_stream):
            for slot in slots:
                assert slot.on_device is not None
                source = _as_bytes(slot.on_device)
                # The caching host allocator keeps pinned blocks for the next step (rounded up to a
                # power of two), and knows from the copy how long the stream needs them.
                slot.on_host = torch.empty(
                    source.shape, dtype=torch.uint8, pin_memory=offload.device.type == "cuda"
                )
                slot.on_host.copy_(source, non_blocking=True)
            self.copied = offload.copy_stream.record_event()

    def let_go(self) -> None:
        """Free the GPU's bytes once they have been copied."""
        if self.copied is not None:
            self.offload.streams.current_stream().wait_event(self.copied)
        for slot in self.slots.values():
            if slot.on_host is not None:
                slot.on_device = None

    @torch.no_grad()
    def fetch(self) -> None:
        """Start the copies back, of what is not on the GPU."""
        offload = self.offload
        slots = [slot for slot in self.slots.values() if slot.on_device is None]
        if not slots:
            return
        for slot in slots:
            assert slot.on_host is not None
            slot.on_device = torch.empty_like(slot.on_host, device=offload.device).untyped_storage()
        offload.copy_stream.wait_stream(offload.streams.current_stream())
        with offload.streams.stream(offload.copy_stream):
            for slot in slots:
                assert slot.on_host is not None and slot.on_device is not None
                _as_bytes(slot.on_device).copy_(slot.on_host, non_blocking=True)
                slot.on_host = None
            self.arrived = offload.copy_stream.record_event()
        self.waited_for_arrival = False

    def make_ready(self) -> None:
        """Before a gradient of this block: its own bytes must be there, the next block's set out."""
        if self.waited_for_arrival:
            return
        self.fetch()
        if self.arrived is not None:
            self.offload.streams.current_stream().wait_event(self.arrived)
        self.waited_for_arrival = True
        if self.previous is not None:
            self.previous.fetch()


@dataclass(eq=False)
class _Slot:
    """One storage, on the device, on the host, or on both while a copy runs."""

    on_device: torch.UntypedStorage | None
    fixed: bool
    """Stays on the device."""
    on_host: Tensor | None = None
    """Its bytes, pinned."""


class _Saved:
    """What autograd holds in place of a tensor: a view of a slot."""

    def __init__(self, bag: _Bag, slot: _Slot, tensor: Tensor):
        self.bag, self.slot = bag, slot
        self.dtype = tensor.dtype
        self.offset, self.size, self.stride = tensor.storage_offset(), tensor.size(), tensor.stride()


def _unpack(saved: "Tensor | _Saved") -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    saved.bag.make_ready()
    storage = saved.slot.on_device
    assert storage is not None
    empty = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return empty.set_(storage, saved.offset, saved.size, saved.stride)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _addresses(block: nn.Module, shared: Iterable[Tensor | None]) -> set[int]:
    tensors = (*block.parameters(), *block.buffers(), *(tensor for tensor in shared if tensor is not None))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
