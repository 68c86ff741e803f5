"""The order of the data: every sequence once an epoch, from seed and step alone."""

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.data.batch_order import BatchOrder, rank_part
from stages.data.permutation import permuted
from stages.data.sequences import FILLER

seeds = st.integers(0, 2**70)
sizes = st.integers(1, 40)


@pytest.fixture(params=["drawn as a whole", "place by place"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small epochs ordered in the way of large ones too."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "place by place":
            patch.setattr("stages.data.batch_order.LARGEST_SHUFFLE", 0)
        yield


both_ways = pytest.mark.usefixtures("either_way")
same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@both_ways
@same_fixture
@given(seed=seeds, batch=sizes, sequences=sizes, epoch=st.integers(0, 5))
def test_every_epoch_sees_every_sequence_exactly_once(
    seed: int, batch: int, sequences: int, epoch: int
) -> None:
    order = BatchOrder(seed, batch, sequences)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    batches = [order.indices(step) for step in steps]
    assert all(indices.shape == (batch,) and indices.dtype == np.int64 for indices in batches)
    seen = np.concatenate(batches)
    assert sorted(seen[seen != FILLER]) == list(range(sequences))
    assert (np.concatenate(batches[:-1] or [seen[:0]]) != FILLER).all()
    assert (seen == FILLER).sum() == order.steps_per_epoch * batch - sequences


@both_ways
@same_fixture
@given(seed=seeds, batch=sizes, sequences=sizes, steps=st.lists(st.integers(0, 200), min_size=1, max_size=9))
def test_a_step_does_not_depend_on_what_was_asked_before(
    seed: int, batch: int, sequences: int, steps: list[int]
) -> None:
    order = BatchOrder(seed, batch, sequences)
    for step in steps:
        np.testing.assert_array_equal(order.indices(step), BatchOrder(seed, batch, sequences).indices(step))


@both_ways
def test_epochs_and_seeds_differ() -> None:
    first = BatchOrder(1, 100, 100).indices(0)
    assert not np.array_equal(first, BatchOrder(1, 100, 100).indices(1))
    assert not np.array_equal(first, BatchOrder(2, 100, 100).indices(0))


def test_the_caller_cannot_change_a_later_answer() -> None:
    order = BatchOrder(1, 4, 10)
    order.indices(0)[:] = 99
    np.testing.assert_array_equal(order.indices(0), BatchOrder(1, 4, 10).indices(0))


def test_the_order_is_the_one_of_earlier_versions() -> None:
    """A run resumed under a newer version must go on with the same data."""
    assert BatchOrder(1337, 4, 11).indices(5).tolist() == [8, 3, 10, -1]


def test_a_large_epoch_is_the_one_of_earlier_versions_and_takes_no_memory() -> None:
    order = BatchOrder(1337, 3, 10**12)
    tracemalloc.start()
    assert order.indices(7).tolist() == [638046826160, 79691184288, 405860495535]
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_place_by_place_is_as_even_as_drawn() -> None:
    """Where places go is spread over all: 100 bins of 100 expected, chi-squared with 99 degrees."""
    moved = permuted(np.arange(10_000), 10**6 + 3, np.random.SeedSequence((1, 2)))
    counts = np.bincount(moved * 100 // (10**6 + 3), minlength=100)
    assert ((counts - 100) ** 2 / 100).sum() < 150  # exceeded once in 1,600
    # Neighbours do not stay in order.
    assert 0.48 < (np.diff(moved) > 0).mean() < 0.52


@given(
    seed=seeds,
    ranks=st.integers(1, 8),
    rows=st.integers(1, 5),
    sequences=st.integers(1, 60),
    step=st.integers(0, 30),
)
def test_ranks_read_disjoint_parts_that_are_the_global_batch(
    seed: int, ranks: int, rows: int, sequences: int, step: int
) -> None:
    whole = BatchOrder(seed, ranks * rows, sequences).indices(step)
    parts = [
        rank_part(BatchOrder(seed, ranks * rows, sequences).indices(step), rank, ranks)
        for rank in range(ranks)
    ]
    assert all(part.shape == (rows,) for part in parts)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 3), (4, 4), (-1, 4)])
def test_ranks_that_cannot_share_a_batch_are_an_error(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {ranks} with a global batch of 8"):
        rank_part(np.arange(8), rank, ranks)


def test_nothing_to_order_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 sequences"):
        BatchOrder(1, 4, 0)
