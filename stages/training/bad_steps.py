"""Losses and gradients that are no numbers: the host's look at what the device left alone.

The step skips itself on the device (stages/training/step.py). With a GradScaler that is how the scale
finds its place, and only many in a row mean that no scale helps. In the other precisions it means that
the training diverged or that a weight is damaged, and each one counts.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from stages.data.sequences import FILLER, MicroBatch
from stages.params import TrainingParams, VariantParams
from stages.training.optimizer_in_backward import OptimizerInBackward
from stages.training.parallel import Parallel, local_gradients
from stages.training.precision import PrecisionPolicy
from stages.training.state import TrainState
from stages.training.step import forward_backward


class BadStepError(RuntimeError):
    """The loss or the gradients are no numbers; the weights are those of the last good step."""


def check_numbers(
    state: TrainState,
    training: TrainingParams,
    variant: VariantParams,
    policy: PrecisionPolicy,
    batch_of_step: Callable[[int], list[tuple[np.ndarray, MicroBatch]]],
    parallel: Parallel,
) -> None:
    """Wait for the device and look whether training may go on.

    Args:
        batch_of_step: the global batch of a step (from 0) as micro-batches on the device, each with the
            numbers of its sequences; asked only where a step was bad. Of several ranks, this one's part.

    Raises:
        BadStepError: more steps were skipped than may be; names the first of them, the micro-batch and
            its sequences.
    """
    if state.scaler.is_enabled():
        if int(state.skipped_in_a_row) >= training.max_overflows_in_a_row:
            raise BadStepError(
                f"the gradients overflowed in {training.max_overflows_in_a_row} steps in a row up to step "
                f"{state.step} and the scale is down to {state.scaler.get_scale():g}; lower "
                "training.learning_rate or use precision amp_bf16, which has fp32's range"
            )
        return
    too_many = int(state.skipped_steps) - training.max_bad_steps
    if too_many <= 0:
        return
    # All steps after the first bad one were skipped too, so it is this far back; with the weights of now
    # it goes wrong again, which tells the micro-batch.
    step = state.step - too_many
    where = _first_bad_micro_batch(state, variant, policy, batch_of_step(step), parallel)
    allowed = f" ({training.max_bad_steps} were left out before)" if training.max_bad_steps else ""
    weights = f"the weights are those of step {step}"
    if isinstance(state.optimizer, OptimizerInBackward):
        weights = "weights whose own gradients were numbers have moved; the last checkpoint is from before"
    raise BadStepError(
        f"step {step + 1}: {where}; {weights}{allowed}. Lower training.learning_rate, or leave such "
        "batches out with training.max_bad_steps"
    )


def may_be_saved(state: TrainState, training: TrainingParams) -> bool:
    """Whether a checkpoint may be made of `state`: not once the run is bound to stop at `check_numbers`."""
    return state.scaler.is_enabled() or int(state.skipped_steps) <= training.max_bad_steps


def _first_bad_micro_batch(
    state: TrainState,
    variant: VariantParams,
    policy: PrecisionPolicy,
    micro_batches: list[tuple[np.ndarray, MicroBatch]],
    parallel: Parallel,
) -> str:
    """Every rank runs all of its micro-batches, for the others may wait for its weights; the first rank that
    found something is believed."""
    ranks = parallel.ranks
    tokens = sum(batch.target_tokens for _, batch in micro_batches)
    target_tokens = max(ranks.sum_on_host([tokens])[0], 1)
    found: str | None = None
    for number, (sequences, batch) in enumerate(micro_batches, 1):
        loss, gradients_are_bad = _loss_and_whether_gradients_are_bad(
            state, variant, policy, batch, target_tokens, parallel
        )
        if found is not None or (math.isfinite(loss) and not gradients_are_bad):
            continue
        if parallel.is_sharded and ranks.has_others and math.isfinite(loss):
            # Gradients are summed before anybody can look at them.
            found = f"a gradient is no number in micro-batch {number} of one of the {ranks.count} ranks"
            continue
        what = "a gradient is no number" if math.isfinite(loss) else f"the loss is {loss}"
        rows = ", ".join(str(sequence) for sequence in sequences if sequence != FILLER)
        whose = f" of rank {ranks.rank}" if ranks.has_others else ""
        where = f"micro-batch {number} of {len(micro_batches)}{whose}, sequences {rows} of the train split"
        found = f"{what} in {where}"
    first = next((theirs for theirs in ranks.gather(found) if theirs is not None), None)
    return first or f"the sum over its {len(micro_batches) * ranks.count} micro-batches overflows"


def _loss_and_whether_gradients_are_bad(
    state: TrainState,
    variant: VariantParams,
    policy: PrecisionPolicy,
    batch: MicroBatch,
    target_tokens: int,
    parallel: Parallel,
) -> tuple[float, bool]:
    """Of one micro-batch of this rank."""
    blocked = torch.ones((), dtype=torch.bool, device=state.model.device)
    with parallel.gradients_travel(is_last=parallel.is_sharded):
        loss = forward_backward(state, batch, target_tokens, variant, policy, blocked, parallel)
    if isinstance(state.optimizer, OptimizerInBackward):
        gradients_are_bad = not bool(torch.isfinite(state.optimizer.grad_norm()))
    else:
        gradients_are_bad = not all(
            bool(torch.isfinite(gradient).all()) for gradient in local_gradients(state.model)
        )
        state.optimizer.zero_grad(set_to_none=True)
    return float(loss), gradients_are_bad
