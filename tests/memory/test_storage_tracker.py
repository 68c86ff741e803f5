"""Allocations and releases, on tensors whose lives are known."""

from typing import Any

import torch
from torch import Tensor

from stages.memory.storage_tracker import MemoryEvents, StorageTracker


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
