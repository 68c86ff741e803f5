"""The processes that train one model together: which of them this is, and how they agree.

One process, a rank, drives one device; torchrun tells each by environment variables which it is. Tensors on a
GPU travel by NCCL, those on the host and Python's objects by gloo: agreeing never waits for the device.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")


class RanksError(ValueError):
    """The environment's ranks and the params do not go together."""


@dataclass(frozen=True)
class Ranks:
    """One of `count` processes. Every method but the properties must be called by all of them, in one order.

    Alone, a method gives back what it was given.
    """

    rank: int = 0
    """Of all machines, from 0."""
    count: int = 1
    local_rank: int = 0
    """On this machine, from 0: also the number of its GPU among the visible ones."""
    local_count: int = 1

    @property
    def is_first(self) -> bool:
        """The first alone keeps files, talks to MLflow and draws the progress bar."""
        return self.rank == 0

    @property
    def has_others(self) -> bool:
        return self.count > 1

    def sum_on_host(self, numbers: Sequence[int]) -> list[int]:
        """The sum over the ranks of each number."""
        if not self.has_others:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks. Values are pickled."""
        if not self.has_others:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: T) -> T:
        """The first rank's value; that of the others is not looked at."""
        if not self.has_others:
            return value
        values: list[Any] = [value if self.is_first else None]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor`, on whatever device it is, by its sum over the ranks; the same bits on each."""
        if self.has_others:
            dist.all_reduce(tensor)
        return tensor


ALONE = Ranks()


def ranks_of_environment() -> Ranks | None:
    """What torchrun says; None where no torchrun is around this process.

    Raises:
        RanksError: its variables are incomplete or no numbers.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    try:
        return Ranks(*(int(os.environ[name]) for name in names))
    except (KeyError, ValueError) as error:
        raise RanksError(
            f"the environment has some of torchrun's variables ({', '.join(names)}) and {error} is wrong or "
            "missing; start the ranks with torchrun or training.ranks, or unset them all"
        ) from None


def join_ranks(ranks: Ranks, device: torch.device, timeout_minutes: float) -> None:
    """Meet the other ranks. One alone may join too: FSDP needs a group also of one.

    Args:
        timeout_minutes: a collective that waits longer for another rank fails.
    """
    torch.set_num_threads(_threads(ranks))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    store = _store_of_this_start(ranks, timeout) if ranks.has_others else dist.HashStore()
    dist.init_process_group(backend, timeout=timeout, rank=ranks.rank, world_size=ranks.count, store=store)


def leave_ranks() -> None:
    """The end of what `join_ranks` began; nothing where it did not."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store_of_this_start(ranks: Ranks, timeout: timedelta) -> dist.Store:
    """Where the ranks find each other, under names that no start before this one used.

    torchrun keeps one store over its restarts: a rank could find the address of one that was killed, and not
    connect to it. On several machines each agent counts its own restarts, so there the names stay the same;
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun use a new store each time.
    """
    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.count, timeout=timeout))
    store.set_timeout(timeout)
    is_one_machine = ranks.local_count == ranks.count
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_machine else "0"
    return dist.PrefixStore(f"start-{restarts}", store)


def _threads(ranks: Ranks) -> int:
    """CPU threads of one operation: the ranks of one machine share its cores."""
    if "OMP_NUM_THREADS" in os.environ or not ranks.has_others:
        return torch.get_num_threads()
    return max(1, torch.get_num_threads() // ranks.local_count)
