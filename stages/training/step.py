"""One optimizer step over a global batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.data.sequences import MicroBatch
from stages.model.loss import chunked_loss, full_loss
from stages.params import TrainingParams, VariantParams
from stages.training.compilation import mark_dynamic_documents
from stages.training.optimizer_in_backward import OptimizerInBackward
from stages.training.precision import PrecisionPolicy
from stages.training.state import TrainState


@dataclass(frozen=True)
class StepOutcome:
    """What happened, as tensors on the device: reading them is the caller's synchronisation."""

    loss: Tensor
    """Mean cross-entropy per target token of the global batch, in nats (fp32 scalar)."""
    grad_norm: Tensor
    """Global L2 norm of the gradients before clipping (fp32 scalar)."""
    skipped: Tensor | None
    """bool scalar: the gradients overflowed and the weights were left alone; None without a scaler."""


def train_step(
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    variant: VariantParams,
    training: TrainingParams,
    policy: PrecisionPolicy,
) -> StepOutcome:
    """Forward and backward over every micro-batch, then one update of the weights.

    Args:
        state: changed in place.
        micro_batches: the global batch, cut into pieces that fit the memory, on the model's device.
    """
    model, optimizer, scaler = state.model, state.optimizer, state.scaler
    # Counted over the whole global batch first. The mean of micro-batch means would weigh the tokens of
    # a short micro-batch more than those of a long one.
    target_tokens = max(sum(batch.target_tokens for batch in micro_batches), 1)
    scale_before = _scale(scaler, model)
    loss = torch.zeros((), dtype=torch.float32, device=scale_before.device)
    for batch in micro_batches:
        mark_dynamic_documents(batch.cu_seqlens, variant)
        with policy.autocast():
            hidden = model(batch.input_ids_BS, batch.cu_seqlens)
            head = model.lm_head.weight
            if variant.loss == "chunked":
                loss_sum = chunked_loss(
                    hidden,
                    head,
                    batch.targets_BS,
                    chunk_tokens=variant.loss_chunk_tokens,
                    expected_grad=scale_before / target_tokens,
                )
            else:
                loss_sum = full_loss(hidden, head, batch.targets_BS)
        del hidden  # or it would live through the backward pass
        micro_loss = loss_sum / target_tokens
        scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()

    if isinstance(optimizer, OptimizerInBackward):
        grad_norm = optimizer.grad_norm()  # the gradients are used and gone
    else:
        # The norm that is clipped must be that of the true gradients, so the scale comes off first.
        scaler.unscale_(optimizer)
        grad_norm = _clip_gradients(model, training.max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    # A lowered scale means that the step was skipped. (`<`, not `!=`: the scale also grows.)
    skipped = _scale(scaler, model) < scale_before if scaler.is_enabled() else None
    state.schedule.advance(skipped)
    if skipped is not None:
        state.skipped_steps += skipped
    state.loss_since_row += loss
    state.step += 1
    state.tokens += sum(batch.input_tokens for batch in micro_batches)
    return StepOutcome(loss, grad_norm, skipped)


def _clip_gradients(model: torch.nn.Module, max_norm: float | None) -> Tensor:
    """Scale all gradients down to the global L2 norm `max_norm`; returns the norm they had.

    The norm is taken in fp32 also of bf16 gradients: `clip_grad_norm_` would round it to 8 bits.
    """
    parameters = list(model.parameters())
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None], 2, torch.float32)
    grad_norm = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, grad_norm)
    return grad_norm


def _scale(scaler: torch.amp.GradScaler, model: torch.nn.Module) -> Tensor:
    """The scaler's factor as a device scalar; `get_scale()` would wait for the device."""
    return scaler.scale(torch.ones((), device=next(model.parameters()).device))  # type: ignore[return-value]
