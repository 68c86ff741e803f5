"""The loop around the step: brings the data, keeps the time, says what happened.

It knows neither files nor tracking. It yields after every step, with a row of the curve every
`log_every_steps` steps, and whoever drives it writes the row down, saves, or stops.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from stages.data.batch_order import BatchOrder, rank_part
from stages.data.sequences import MicroBatch, PackedSequences, PaddedSequences
from stages.measure.compilation import CompileWatch
from stages.measure.peak_memory import PeakMemory, highest, measure_peak
from stages.measure.throughput import StepTimer
from stages.params import Params, VariantParams
from stages.training.bad_steps import check_numbers
from stages.training.parallel import Parallel
from stages.training.precision import PrecisionPolicy
from stages.training.state import TrainState
from stages.training.step import StepOutcome, StepStopped, forward_backward, train_step


@dataclass(frozen=True)
class CurveRow:
    """One row of the training curve: a result, the same in every run of the same params."""

    step: int
    tokens: int
    """Seen so far, padding not counted."""
    loss: float
    """Mean over the steps since the last row whose loss was a number, in nats per target token."""
    learning_rate: float
    """Of the last step."""
    grad_norm: float
    """Of the last step, before clipping."""


@dataclass
class Measurements:
    """What this run took on this machine; filled while `training_rows` runs."""

    timer: StepTimer
    compilation: CompileWatch
    peak: PeakMemory | None = None
    disturbed: bool = False
    """Set by whoever does something between two steps that is no training: the interval is recorded and
    not counted."""


def training_steps(
    state: TrainState,
    sequences: PackedSequences | PaddedSequences,
    params: Params,
    variant_name: str,
    policy: PrecisionPolicy,
    measurements: Measurements,
    should_stop: Callable[[], bool] = lambda: False,
    parallel: Parallel | None = None,
) -> Iterator[CurveRow | None]:
    """Train from `state.step` to the end of the token budget; yields after every step.

    Where `should_stop` says so after a micro-batch, the step it belongs to is given up and the iterator
    ends early; `state` is that of the last whole step. Of several ranks each calls this, reads its part of
    every global batch, and all end at the same step.

    The peak memory is that of the second step of this process: the optimizer's states exist then, and
    what the first step compiled or initialised is over. On a CPU that step runs under a profiler, so
    its interval is not counted for speed.

    Raises:
        BadStepError: the loss or the gradients are no numbers. A CPU is asked after every step, a GPU
            whenever host and device wait for each other anyway: at the rows.
    """
    training, variant = params.training, params.variants[variant_name]
    order = BatchOrder(params.seed, training.global_batch_size, len(sequences))
    device = state.model.device
    parallel = parallel or Parallel(state.model, variant)
    ranks = parallel.ranks
    timer = measurements.timer
    first_step, tokens_at_lap = state.step, state.tokens

    def batch_of_step(step: int) -> list[tuple[np.ndarray, MicroBatch]]:
        indices = rank_part(order.indices(step), ranks.rank, ranks.count).reshape(
            -1, variant.micro_batch_size
        )
        return [(rows, _to_device(sequences.micro_batch(rows), device)) for rows in indices]

    timer.start(time.perf_counter(), state.step)
    if parallel.keeps_gradients and state.step < training.num_steps:
        _settle_buckets(state, batch_of_step(state.step)[0][1], variant, policy, parallel)
    while state.step < training.num_steps:
        micro_batches = [batch for _, batch in batch_of_step(state.step)]
        rate = state.schedule.learning_rate.clone()
        step = partial(train_step, state, micro_batches, variant, training, policy, should_stop, parallel)
        profiled = state.step == min(first_step + 1, training.num_steps - 1)
        try:
            if profiled:
                outcome, measurements.peak = _measured(device, step, measurements.peak)
            else:
                outcome = step()
        except StepStopped:
            return
        if state.step == first_step + 1:
            measurements.compilation.mark_steady()

        # The first step is an interval of its own: it holds compilation and the first growth of caches.
        is_row = state.step % training.log_every_steps == 0 or state.step == training.num_steps
        if is_row or profiled or state.step == first_step + 1:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            disturbed, measurements.disturbed = profiled or measurements.disturbed, False
            timer.lap(time.perf_counter(), state.step, state.tokens - tokens_at_lap, disturbed)
            tokens_at_lap = state.tokens
        if is_row or device.type == "cpu":
            check_numbers(state, training, variant, policy, batch_of_step, parallel)
        row = None
        if is_row:
            losses = int(state.losses_since_row)
            row = CurveRow(
                step=state.step,
                tokens=state.tokens,
                loss=float(state.loss_since_row) / losses if losses else math.nan,
                learning_rate=float(rate),
                grad_norm=float(outcome.grad_norm),
            )
            state.loss_since_row.zero_()
            state.losses_since_row.zero_()
        yield row


def _settle_buckets(
    state: TrainState,
    batch: MicroBatch,
    variant: VariantParams,
    policy: PrecisionPolicy,
    parallel: Parallel,
) -> None:
    """Two backward passes for nothing, before the first step of a start.

    DDP orders its buckets by what the first one shows, and the second makes gradients views of them. So three
    ranks or more add up in the same order after a restart as in a run that was never stopped, and the first
    step needs no more memory than any other.
    """
    blocked = torch.ones((), dtype=torch.bool, device=state.model.device)
    for are_views in (False, True):
        with parallel.gradients_travel(is_last=True):
            forward_backward(state, batch, max(batch.target_tokens, 1), variant, policy, blocked, parallel)
        state.optimizer.zero_grad(set_to_none=not are_views)


def _measured(
    device: torch.device, step: Callable[[], StepOutcome], before: PeakMemory | None
) -> tuple[StepOutcome, PeakMemory]:
    """The step's outcome and its peak, or the peak of an earlier part of this run where that was higher."""
    outcomes: list[StepOutcome] = []
    peak = measure_peak(device, lambda: outcomes.append(step()))
    return outcomes[0], highest([before, peak]) or peak


def _to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return batch

    def move(tensor: torch.Tensor) -> torch.Tensor:
        # Pinned memory lets the copy run beside the kernels of the step before.
        return tensor.pin_memory().to(device, non_blocking=True)

    return replace(
        batch,
        input_ids_BS=move(batch.input_ids_BS),
        targets_BS=move(batch.targets_BS),
        cu_seqlens=None if batch.cu_seqlens is None else move(batch.cu_seqlens),
    )
