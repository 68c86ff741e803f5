"""The order of the data: every sequence once an epoch, from seed and step alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data.batch_order import BatchOrder
from stages.data.sequences import FILLER

seeds = st.integers(0, 2**70)
sizes = st.integers(1, 40)


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


@given(seed=seeds, batch=sizes, sequences=sizes, steps=st.lists(st.integers(0, 200), min_size=1, max_size=9))
def test_a_step_does_not_depend_on_what_was_asked_before(
    seed: int, batch: int, sequences: int, steps: list[int]
) -> None:
    order = BatchOrder(seed, batch, sequences)
    for step in steps:
        np.testing.assert_array_equal(order.indices(step), BatchOrder(seed, batch, sequences).indices(step))


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


def test_nothing_to_order_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 sequences"):
        BatchOrder(1, 4, 0)
