"""A training by several ranks: who starts them, what each is, and how one that cannot go on ends.

`training.ranks: N` starts N processes of this stage on this machine. Under torchrun, on one machine or many,
each process is one of its ranks, and its number of ranks counts.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from stages.device_lock import hold_device
from stages.measure.hardware import HardwareError, select_device
from stages.params import Params, ParamsError
from stages.rank_launch import launch_ranks
from stages.rank_process import is_lost_peer, leave, leave_for_lost_peer, record_failure
from stages.train_run import say
from stages.training.parallel import is_sharded
from stages.training.ranks import Ranks, join_ranks, leave_ranks
from stages.work_folder import hold_work_folder


def start_ranks(params: Params, variant: str, arguments: list[str]) -> int:
    """Train with `training.ranks` processes on this machine; returns the stage's exit status.

    Args:
        arguments: of this stage, for each of them.

    Raises:
        DeviceLockError: they need more GPUs than there are.
    """
    name, count = f"train {variant}", params.training.ranks
    with hold_device(name, params.hardware.device, count):  # for them: what they see is what is held here
        return launch_ranks(name, count, ["-m", "stages.train", *arguments])


def with_ranks(params: Params, variant: str, ranks: Ranks) -> Params:
    """The params with the number of ranks that there are.

    Raises:
        ParamsError: the global batch cannot be shared by so many.
    """
    if ranks.count == params.training.ranks:
        return params
    training = params.training.model_copy(update={"ranks": ranks.count})
    problems = [f"training.{key}: {message}" for key, message in training.problems()] or [
        f"variants.{variant}.{key}: {message}"
        for key, message in params.variants[variant].conflicts(training, params.hardware)
    ]
    if ranks.has_others and params.hardware.on_out_of_memory == "halve":
        problems.append("hardware.on_out_of_memory: halve is for one rank; use stop")
    if problems:
        raise ParamsError(f"with {ranks.count} ranks, as torchrun has it", problems)
    return params.model_copy(update={"training": training})


def rank_device(params: Params, ranks: Ranks) -> torch.device:
    """The device of this rank: of several GPUs that of its number on this machine.

    Raises:
        HardwareError: there is none for it.
    """
    device = select_device(params.hardware.device)
    if device.type == "cuda" and ranks.has_others:
        visible = torch.cuda.device_count()
        if ranks.local_count > visible:
            raise HardwareError(
                f"{ranks.local_count} ranks on this machine need as many GPUs and {visible} can be seen; "
                "lower training.ranks, or look at CUDA_VISIBLE_DEVICES"
            )
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def joined_ranks(params: Params, variant: str, device: torch.device, ranks: Ranks) -> Iterator[None]:
    """The ranks know each other in this block; one that shards joins also alone."""
    if ranks.has_others or is_sharded(params.variants[variant]):
        join_ranks(ranks, device, params.hardware.collective_timeout_minutes)
    yield
    leave_ranks()  # not after an error: it would wait for ranks that do not come


@contextlib.contextmanager
def shared_work_folder(
    work: Path, variant: str, fingerprint: str, ranks: Ranks, *, fresh: bool
) -> Iterator[Path]:
    """The work folder, which the first rank holds for all.

    An experiment waits for another that trains the same variant, and takes its result. Who starts twice by
    hand, or beside an orphan, is told at once; and so are several ranks, of which all would wait for one.
    """
    waits_as = f"train {variant}" if "DVC_EXP_NAME" in os.environ and not ranks.has_others else None
    with contextlib.ExitStack() as held:
        folder = None
        if ranks.is_first:
            # Of torchrun's starts the first alone is fresh: those after a failure go on.
            fresh = fresh and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            folder = held.enter_context(
                hold_work_folder(work, "train", variant, fingerprint, fresh=fresh, waits_as=waits_as)
            )
        shared = ranks.from_first(folder)
        assert shared is not None, "the first rank has it"
        yield shared


@contextlib.contextmanager
def leaving(ranks: Ranks, timeout_minutes: float, mistakes: tuple[type[Exception], ...]) -> Iterator[None]:
    """Around all that a rank does: where it fails as nobody expected, or lost the others, it leaves without
    waiting for them.

    Args:
        mistakes: errors whose message is a sentence for the user; they are raised, as any by a rank alone.
    """
    try:
        yield
    except Exception as error:
        if not ranks.has_others:
            raise
        if is_lost_peer(error):
            leave_for_lost_peer(error, timeout_minutes)
        if isinstance(error, mistakes):
            raise
        record_failure(f"{type(error).__name__}: {error}", error)
        leave(1)


def end(name: str, problem: str, status: int, ranks: Ranks | None) -> int:
    """Say why this process ends, and return its status; a rank of several leaves at once.

    What every rank of several knows, as that it was stopped, the first one says.
    """
    if ranks is None or not ranks.has_others:
        say(f"{name}: {problem}")
        return status
    if status == 1:
        record_failure(problem)
    elif ranks.is_first:
        say(f"{name}: {problem}")
    leave(status)
