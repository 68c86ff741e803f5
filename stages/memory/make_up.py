"""What memory is made of, at the peak and over the step."""

from collections import Counter
from dataclasses import dataclass

from stages.memory.step_trace import BACKWARD, CLIPPING, HEAD_AND_LOSS, OPTIMIZER_STEP, StepTrace
from stages.memory.storage_tracker import Block, Phase

PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer_state"
ACTIVATIONS, LOGITS_AND_LOSS, TEMPORARIES = "activations", "logits_and_loss", "temporaries"
CATEGORIES = (PARAMETERS, OPTIMIZER_STATE, GRADIENTS, ACTIVATIONS, LOGITS_AND_LOSS, TEMPORARIES)

RESIDUAL_STREAM, WEIGHT_COPIES, BATCH = "residual stream", "16-bit weight copies", "batch and rotary tables"
OFFLOADED = "offloaded, on the device again"
GATHERED = "weights gathered from the ranks"


@dataclass(frozen=True)
class Timeline:
    """Live bytes over the second step, in so many points as asked for; the peak is always among them."""

    event: tuple[int, ...]
    """Allocations and releases so far, ascending."""
    live_bytes: dict[str, tuple[int, ...]]
    """For each of CATEGORIES, at each point."""
    phases: tuple[tuple[int, str], ...]
    """(first event, name) of each stretch of the step."""


@dataclass(frozen=True)
class MakeUp:
    """Live bytes at the fullest moment."""

    event: int
    moment: str
    by_category: dict[str, int]
    activations_by_kind: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.by_category.values())


def make_up_of_peak(trace: StepTrace, rounding: int) -> MakeUp:
    """The peak; of several equal ones the first.

    Args:
        rounding: the allocator gives multiples of so many bytes.
    """
    blocks = trace.recorded.blocks
    sizes = _rounded_sizes(trace, rounding)
    live = highest = peak_event = 0
    for event, index in enumerate(trace.recorded.events):
        live += sizes[index] if index >= 0 else -sizes[~index]
        if live > highest and event >= trace.second_step:
            highest, peak_event = live, event
    by_category: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    for index in trace.recorded.events[: peak_event + 1]:
        if index >= 0 and not _released_by(blocks[index], peak_event):
            category = category_of(trace, index)
            by_category[category] += sizes[index]
            if category == ACTIVATIONS:
                by_kind[_kind(trace, index)] += sizes[index]
    return MakeUp(
        peak_event,
        moment(_phase_at(trace, peak_event)),
        {name: by_category[name] for name in CATEGORIES},
        dict(by_kind.most_common()),
    )


def host_peak_bytes(trace: StepTrace) -> int:
    """Highest bytes of the trainer's tensors in host memory in the second step; 0 where it keeps none there.

    Weights and gradients are pinned, and what is pinned is rounded up to a power of two
    (ATen/core/CachingHostAllocator.h).
    """
    pinned = trace.parameters | trace.gradients
    sizes = [
        1 << (block.host_bytes - 1).bit_length() if index in pinned and block.host_bytes else block.host_bytes
        for index, block in enumerate(trace.recorded.blocks)
    ]
    live = highest = 0
    for event, index in enumerate(trace.recorded.events):
        live += sizes[index] if index >= 0 else -sizes[~index]
        if event >= trace.second_step:
            highest = max(highest, live)
    return highest


def timeline(trace: StepTrace, rounding: int, points: int) -> Timeline:
    """The fullest moment of each of `points` equal stretches of events."""
    sizes = _rounded_sizes(trace, rounding)
    events = trace.recorded.events
    categories = {index: CATEGORIES.index(category_of(trace, index)) for index in events if index >= 0}
    live = [0] * len(CATEGORIES)
    first = trace.second_step
    stretch = -(-(len(events) - first) // points)
    chosen: list[tuple[int, tuple[int, ...]]] = []
    fullest, highest = (0, tuple(live)), -1
    for event, index in enumerate(events, -first):
        if index >= 0:
            live[categories[index]] += sizes[index]
        else:
            live[categories[~index]] -= sizes[~index]
        if event < 0:
            continue
        if (total := sum(live)) > highest:
            fullest, highest = (event, tuple(live)), total
        if (event + 1) % stretch == 0 or event + 1 == len(events) - first:
            chosen.append(fullest)
            highest = -1
    return Timeline(
        tuple(event for event, _ in chosen),
        {name: tuple(bytes_[column] for _, bytes_ in chosen) for column, name in enumerate(CATEGORIES)},
        tuple(
            (phase.start - first, moment(phase))
            for phase in trace.recorded.phases
            if phase.direction and phase.start >= first
        ),
    )


def _rounded_sizes(trace: StepTrace, rounding: int) -> list[int]:
    """Bytes of each block as the allocator counts them."""
    return [-(-block.bytes // rounding) * rounding for block in trace.recorded.blocks]


def moment(phase: Phase) -> str:
    """A phase in words, such as `block 3 of 12, backward`."""
    return ", ".join(word for word in (phase.part, phase.direction) if word)


def category_of(trace: StepTrace, index: int) -> str:
    """Of a block, once for its whole life."""
    if index in trace.parameters:
        return PARAMETERS
    if index in trace.optimizer_state:
        return OPTIMIZER_STATE
    if index in trace.gradients:
        return GRADIENTS
    if index in trace.batch_and_tables:
        return ACTIVATIONS
    block = trace.recorded.blocks[index]
    phase = trace.recorded.phases[block.phase]
    if phase.part == HEAD_AND_LOSS and not block.gathered:
        return LOGITS_AND_LOSS
    if block.returned or block.gathered:
        return ACTIVATIONS
    if phase.direction in (BACKWARD, CLIPPING, OPTIMIZER_STEP, ""):
        return TEMPORARIES
    # Made going forward, for the first time or again: saved if it outlives that.
    end = trace.recorded.phases[block.phase + 1].start
    return TEMPORARIES if _released_by(block, end) else ACTIVATIONS


def _kind(trace: StepTrace, index: int) -> str:
    block = trace.recorded.blocks[index]
    if index in trace.batch_and_tables:
        return BATCH
    if block.gathered:
        return GATHERED
    if block.source in trace.parameters:
        return WEIGHT_COPIES
    if block.returned:
        return OFFLOADED
    return block.place or RESIDUAL_STREAM


def _released_by(block: Block, event: int) -> bool:
    return block.released_at is not None and block.released_at <= event


def _phase_at(trace: StepTrace, event: int) -> Phase:
    return next(phase for phase in reversed(trace.recorded.phases) if phase.start <= event)
