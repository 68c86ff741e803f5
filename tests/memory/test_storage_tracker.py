"""Allocations and releases, on tensors whose lives are known."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.measure.peak_memory import live_cpu_blocks, measure_peak
from stages.memory.storage_tracker import MemoryEvents, StorageTracker

CPU = torch.device("cpu")


def tracked() -> StorageTracker:
    tracker = StorageTracker(lambda operator, args, result: 0)
    tracker.recorded.begin("", "")
    return tracker


def sizes(recorded: MemoryEvents) -> list[int]:
    """Bytes of each event, releases negative."""
    return [
        recorded.blocks[index].bytes if index >= 0 else -recorded.blocks[~index].bytes
        for index in recorded.events
    ]


def test_a_storage_counts_once_and_until_its_last_view_is_gone() -> None:
    with tracked() as tracker:
        whole = torch.empty(100)
        view = whole[10:20].view(2, 5)
        del whole
        other = torch.empty(3)
        del view
        other.add_(1)
    assert sizes(tracker.recorded) == [400, 12, -400]


def test_what_autograd_saves_lives_until_backward() -> None:
    weight = torch.ones(10, requires_grad=True)
    with tracked() as tracker:
        tracker.follow(weight)
        loss = weight.exp().sum()
        assert sizes(tracker.recorded) == [40, 40, 4], "the exponential is saved"
        loss.backward()
    assert tracker.block_of(weight.grad) is not None  # type: ignore[arg-type]
    assert -40 in sizes(tracker.recorded)


def apart(weight: Tensor) -> Tensor:
    return (weight.exp() * weight).sum()


def shared(weight: Tensor) -> Tensor:
    """Both terms of the sum get the same tensor as their gradient."""
    middle = weight.exp()
    return (middle + middle).exp().sum()


class _SumByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2 + grad


def by_hand(weight: Tensor) -> Tensor:
    return _SumByHand.apply(weight.exp()).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss", [apart, shared, by_hand])
def test_gradients_are_summed_where_autograd_sums_them(loss: Callable[[Tensor], Tensor]) -> None:
    """In place where nobody else holds them: an operator that is looked at shows a new tensor instead."""
    weight = torch.ones(100, requires_grad=True)

    def step() -> None:
        weight.grad = None
        loss(weight).backward()

    before = sum(live_cpu_blocks().values())
    measured = measure_peak(CPU, step).bytes - before
    weight.grad = None
    with tracked() as tracker:
        step()
    assert max(itertools.accumulate(sizes(tracker.recorded))) == measured


def test_tensors_that_do_not_count_have_no_bytes_and_neither_have_their_views() -> None:
    outside = torch.ones(10)
    with tracked() as tracker:
        tracker.follow(outside, counts=False)
        assert outside.view(2, 5).sum() == 10
    assert [size for size in sizes(tracker.recorded) if abs(size) > 4] == []


def test_a_workspace_is_there_beside_the_result_and_gone_again() -> None:
    def workspace(operator: Any, args: tuple[Tensor, ...], result: Tensor) -> int:
        return 1000 if operator is torch.ops.aten.exp.default else 0

    tracker = StorageTracker(workspace)
    tracker.recorded.begin("", "")
    with tracker:
        kept = torch.ones(5).exp()
    assert kept.numel() == 5
    assert sizes(tracker.recorded) == [20, 20, 1000, -1000, -20]


def test_nothing_is_recorded_once_stopped() -> None:
    with tracked() as tracker:
        kept = torch.empty(5)
    recorded = tracker.stop()
    del kept
    assert sizes(recorded) == [20]
