"""One optimizer step over a global batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.data.sequences import MicroBatch
from stages.model.llama import Llama
from stages.model.loss import chunked_loss, full_loss
from stages.params import TrainingParams, VariantParams
from stages.training.compilation import mark_dynamic_documents
from stages.training.optimizer_in_backward import OptimizerInBackward
from stages.training.parallel import Parallel, local_gradients
from stages.training.precision import PrecisionPolicy
from stages.training.state import TrainState
from stages.training.step_verdict import step_unless


@dataclass(frozen=True)
class StepOutcome:
    """What happened, as tensors on the device: reading them is the caller's synchronisation."""

    loss: Tensor
    """Mean cross-entropy per target token of the global batch, in nats (fp32 scalar)."""
    grad_norm: Tensor
    """Global L2 norm of the gradients before clipping (fp32 scalar)."""
    skipped: Tensor
    """bool scalar: the loss or the gradients were no numbers, and the weights were left alone."""


class StepStopped(Exception):
    """The step was given up between two micro-batches."""


def train_step(
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    variant: VariantParams,
    training: TrainingParams,
    policy: PrecisionPolicy,
    should_stop: Callable[[], bool] = lambda: False,
    parallel: Parallel | None = None,
) -> StepOutcome:
    """Forward and backward over every micro-batch, then one update of the weights.

    A step whose loss or gradients are no numbers changes no weight. The host need not know: it looks
    when it waits for the device anyway (stages/training/bad_steps.py).

    Args:
        state: changed in place.
        micro_batches: this rank's part of the global batch, cut into pieces that fit the memory, on the
            model's device.
        should_stop: asked between two micro-batches; of several ranks, before the first.
        parallel: the model on several ranks; None: this process is alone with it.

    Raises:
        StepStopped: `should_stop` said so; `state` is as before the step.
    """
    model, optimizer, scaler = state.model, state.optimizer, state.scaler
    parallel = parallel or Parallel(model, variant)
    ranks = parallel.ranks
    # Counted over the whole global batch first, the other ranks' parts included. The mean of micro-batch
    # means would weigh the tokens of a short micro-batch more than those of a long one.
    target_tokens, input_tokens, stops = ranks.sum_on_host(
        [
            sum(batch.target_tokens for batch in micro_batches),
            sum(batch.input_tokens for batch in micro_batches),
            ranks.has_others and should_stop(),
        ]
    )
    if stops:
        raise StepStopped  # every rank: none is left waiting for another's gradients
    target_tokens = max(target_tokens, 1)
    scale_before = _scale(scaler, model)
    loss = torch.zeros((), dtype=torch.float32, device=scale_before.device)
    # Once more steps were skipped than may be, all are: the weights stay until the host looks and stops.
    blocked = torch.zeros_like(loss, dtype=torch.bool)
    if not scaler.is_enabled():
        blocked = state.skipped_steps > training.max_bad_steps
    for number, batch in enumerate(micro_batches):
        if number and not ranks.has_others and should_stop():
            # Gradients are all that has changed, so the state is that of the step before.
            optimizer.zero_grad(set_to_none=True)
            raise StepStopped
        with parallel.gradients_travel(is_last=number == len(micro_batches) - 1):
            loss += forward_backward(state, batch, target_tokens, variant, policy, blocked, parallel)
    ranks.sum_(loss)

    if isinstance(optimizer, OptimizerInBackward):
        grad_norm = optimizer.grad_norm()  # the gradients are used and gone
    else:
        # The norm that is clipped must be that of the true gradients, so the scale comes off first. Where
        # they are cut up, an overflow in one rank's part is one in all (DTensor's dispatcher sees to it).
        scaler.unscale_(optimizer)
        grad_norm = _clip_gradients(model, training.max_grad_norm, parallel).to(loss.device)
    is_number = torch.isfinite(loss)
    # The host with parallelism fsdp_cpu_offload: there the optimizer steps.
    weights_device = model.embed_tokens.weight.device
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
        # A lowered scale means that the step was skipped. (`<`, not `!=`: the scale also grows.)
        skipped = _scale(scaler, model) < scale_before
    else:
        skipped = ~(is_number & torch.isfinite(grad_norm)) | blocked
        if not isinstance(optimizer, OptimizerInBackward):
            step_unless(optimizer, skipped.to(weights_device))
    parallel.drop_gradients(optimizer)
    state.schedule.advance(skipped.to(weights_device))
    state.skipped_steps += skipped
    state.skipped_in_a_row.copy_((state.skipped_in_a_row + 1) * skipped)
    state.loss_since_row += torch.where(is_number, loss, 0.0)
    state.losses_since_row += is_number
    state.step += 1
    state.tokens += input_tokens
    return StepOutcome(loss, grad_norm, skipped)


def forward_backward(
    state: TrainState,
    batch: MicroBatch,
    target_tokens: int,
    variant: VariantParams,
    policy: PrecisionPolicy,
    blocked: Tensor,
    parallel: Parallel,
) -> Tensor:
    """Add the gradients of one micro-batch; returns its share of the loss (fp32 scalar).

    Args:
        target_tokens: of the whole global batch.
        blocked: bool scalar: an optimizer in backward must change nothing.
        parallel: runs the model.
    """
    scaler = state.scaler
    mark_dynamic_documents(batch.cu_seqlens, variant)
    with policy.autocast():
        hidden = parallel.forward(batch.input_ids_BS, batch.cu_seqlens)
        head = state.model.lm_head.weight
        expected_grad = _scale(scaler, state.model) / target_tokens
        if variant.loss == "chunked":
            loss_sum = chunked_loss(
                hidden,
                head,
                batch.targets_BS,
                chunk_tokens=variant.loss_chunk_tokens,
                expected_grad=expected_grad,
            )
        else:
            loss_sum = full_loss(hidden, head, batch.targets_BS, expected_grad=expected_grad)
    del hidden  # or it would live through the backward pass
    micro_loss = loss_sum / target_tokens
    if isinstance(state.optimizer, OptimizerInBackward):
        # What can be known before the weights change: the rest each parameter finds out for itself.
        state.optimizer.skipped = blocked | ~torch.isfinite(micro_loss.detach())
    scaler.scale(micro_loss).backward()
    return micro_loss.detach()


def _clip_gradients(model: Llama, max_norm: float | None, parallel: Parallel) -> Tensor:
    """Scale all gradients down to the global L2 norm `max_norm`; returns the norm they had.

    The norm is taken in fp32 also of bf16 gradients: `clip_grad_norm_` would round it to 8 bits.
    """
    gradients = local_gradients(model)
    grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))
    if parallel.is_sharded:
        # Each rank has seen its part of every gradient.
        grad_norm = parallel.ranks.sum_(grad_norm.square()).sqrt()
    if max_norm is not None:
        # As torch.nn.utils.clip_grads_with_norm_, which takes no parts of gradients.
        torch._foreach_mul_(gradients, (max_norm / (grad_norm + 1e-6)).clamp(max=1.0))
    return grad_norm


def _scale(scaler: torch.amp.GradScaler, model: Llama) -> Tensor:
    """The scaler's factor as a device scalar; `get_scale()` would wait for the device."""
    return scaler.scale(torch.ones((), device=model.device))  # type: ignore[return-value]
