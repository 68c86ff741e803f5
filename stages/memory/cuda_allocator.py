"""CUDA's caching allocator, followed allocation by allocation: what it takes from the driver, and how much of
a block is given away whole because the rest is too small to be split off.

After c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of PyTorch 2.13, with the default
settings (no expandable segments, no limit on splitting). Each stream has memory of its own; the step has one
stream, with FSDP2 a few. Memory is taken from the driver in segments; a request is served from the smallest
free block that holds it; neighbouring free blocks of a segment become one again.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIN_BLOCK = 512
"""Requests are rounded up to multiples of it."""

_SMALL_SIZE = 2**20
"""Requests up to this are served from a pool of their own."""
_SMALL_SEGMENT = 2 * 2**20
_LARGE_SEGMENT = 20 * 2**20
"""For large requests below `_MIN_LARGE_ALLOCATION`; above, a segment is the request rounded up."""
_MIN_LARGE_ALLOCATION = 10 * 2**20
_ROUND_LARGE = 2 * 2**20


@dataclass(frozen=True)
class AllocatorPeaks:
    """Highest bytes over a sequence of events, as torch.cuda reports them."""

    allocated: int
    """max_memory_allocated: of blocks in use, the rests that were not split off included."""
    reserved: int
    """max_memory_reserved: of segments."""


class _Block:
    __slots__ = ("next", "previous", "segment", "size", "start")

    def __init__(self, segment: int, start: int, size: int):
        self.segment, self.start, self.size = segment, start, size
        self.previous: _Block | None = None
        self.next: _Block | None = None


class _Pool:
    """The free blocks of small, or of large requests."""

    def __init__(self, small: bool):
        self.small = small
        self._free: list[tuple[int, int, int]] = []
        self._blocks: dict[tuple[int, int], _Block] = {}

    def take(self, size: int) -> _Block | None:
        """The smallest free block that holds `size`, cut to it where the rest is worth keeping."""
        found = bisect_left(self._free, (size, -1, -1))
        if found == len(self._free):
            return None
        _, segment, start = self._free.pop(found)
        return self.cut(self._blocks.pop((segment, start)), size)

    def cut(self, block: _Block, size: int) -> _Block:
        rest = block.size - size
        if rest >= MIN_BLOCK if self.small else rest > _SMALL_SIZE:
            after = _Block(block.segment, block.start + size, rest)
            after.previous, after.next = block, block.next
            if block.next is not None:
                block.next.previous = after
            block.next, block.size = after, size
            self._add(after)
        return block

    def give_back(self, block: _Block) -> None:
        for neighbour in (block.previous, block.next):
            if neighbour is None or (neighbour.segment, neighbour.start) not in self._blocks:
                continue
            self._remove(neighbour)
            first, second = (neighbour, block) if neighbour is block.previous else (block, neighbour)
            first.size += second.size
            first.next = second.next
            if second.next is not None:
                second.next.previous = first
            block = first
        self._add(block)

    def _add(self, block: _Block) -> None:
        self._blocks[block.segment, block.start] = block
        insort(self._free, (block.size, block.segment, block.start))

    def _remove(self, block: _Block) -> None:
        del self._blocks[block.segment, block.start]
        del self._free[bisect_left(self._free, (block.size, block.segment, block.start))]


def allocator_peaks(
    sizes: Sequence[int], events: Iterable[int], measured_from: int, streams: Sequence[int] | None = None
) -> AllocatorPeaks:
    """Follow a sequence of allocations and releases from an empty device.

    Args:
        sizes: bytes asked for, for each block.
        events: `i`: block i was allocated; `~i` (negative): it was released.
        measured_from: the peaks count from this event on.
        streams: the stream of each block; None: all are of one.
    """
    pools: dict[tuple[int, bool], _Pool] = {}

    def pool_of(index: int) -> _Pool:
        small = sizes[index] <= _SMALL_SIZE
        key = (0 if streams is None else streams[index], small)
        if key not in pools:
            pools[key] = _Pool(small)
        return pools[key]

    living: dict[int, _Block] = {}
    segments = reserved = allocated = 0
    highest_allocated = highest_reserved = 0
    for event, index in enumerate(events):
        if index < 0:
            block = living.pop(~index, None)
            if block is not None:
                allocated -= block.size
                pool_of(~index).give_back(block)
        elif sizes[index]:
            size = -(-sizes[index] // MIN_BLOCK) * MIN_BLOCK
            pool = pool_of(index)
            block = pool.take(size)
            if block is None:
                segment = _segment_bytes(size)
                reserved += segment
                segments += 1
                block = pool.cut(_Block(segments, 0, segment), size)
            living[index] = block
            allocated += block.size
        if event >= measured_from:
            highest_allocated = max(highest_allocated, allocated)
            highest_reserved = max(highest_reserved, reserved)
    return AllocatorPeaks(highest_allocated, highest_reserved)


def _segment_bytes(size: int) -> int:
    if size <= _SMALL_SIZE:
        return _SMALL_SEGMENT
    if size < _MIN_LARGE_ALLOCATION:
        return _LARGE_SEGMENT
    return -(-size // _ROUND_LARGE) * _ROUND_LARGE
