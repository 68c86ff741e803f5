"""CUDA's caching allocator as it is followed here, against its rules worked out by hand."""

from hypothesis import given
from hypothesis import strategies as st

from stages.memory.cuda_allocator import MIN_BLOCK, allocator_peaks

MIB = 2**20


def test_small_requests_share_a_segment_of_2_mib() -> None:
    peaks = allocator_peaks([1, 513, MIB], [0, 1, 2], 0)
    assert (peaks.allocated, peaks.reserved) == (512 + 1024 + MIB, 2 * MIB)


def test_a_rest_of_up_to_1_mib_is_given_away_with_a_large_block() -> None:
    assert allocator_peaks([11 * MIB], [0], 0).allocated == 12 * MIB
    assert allocator_peaks([12 * MIB + 1], [0], 0).allocated == 12 * MIB + 512
    assert allocator_peaks([12 * MIB + 1], [0], 0).reserved == 14 * MIB
    assert allocator_peaks([2 * MIB], [0], 0).reserved == 20 * MIB


def test_released_neighbours_become_one_block_again() -> None:
    sizes = [6 * MIB, 6 * MIB, 6 * MIB, 18 * MIB]
    assert allocator_peaks(sizes, [0, 1, 2, ~1, ~0, ~2, 3], 0).reserved == 20 * MIB
    assert allocator_peaks(sizes, [0, 1, 2, ~0, ~2, 3], 0).reserved == 38 * MIB, "the middle one divides them"


def test_the_smallest_block_that_holds_a_request_serves_it() -> None:
    sizes = [40 * MIB, 20 * MIB, 20 * MIB, 40 * MIB]
    assert allocator_peaks(sizes, [0, 1, ~0, ~1, 2, 3], 0).reserved == 60 * MIB


def test_peaks_count_from_where_they_are_measured() -> None:
    peaks = allocator_peaks([30 * MIB, 2 * MIB], [0, ~0, 1], 2)
    assert (peaks.allocated, peaks.reserved) == (2 * MIB, 30 * MIB)


@given(st.lists(st.tuples(st.integers(0, 30 * MIB), st.integers(0, 5)), max_size=60))
def test_what_is_asked_for_is_in_use_and_what_is_in_use_is_reserved(requests: list[tuple[int, int]]) -> None:
    """Each request lives until as many others as it says were made after it."""
    events: list[int] = []
    for number, _ in enumerate(requests):
        events.append(number)
        events += [~other for other in range(number) if other + requests[other][1] == number]
    sizes = [size for size, _ in requests]
    live = highest = 0
    for index in events:
        rounded = -(-sizes[max(index, ~index)] // MIN_BLOCK) * MIN_BLOCK
        live += rounded if index >= 0 else -rounded
        highest = max(highest, live)
    peaks = allocator_peaks(sizes, events, 0)
    assert highest <= peaks.allocated <= peaks.reserved
    assert peaks.allocated <= highest + MIB * len(requests)
    assert peaks.reserved % (2 * MIB) == 0
