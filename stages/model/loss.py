"""Next-token cross-entropy, with all logits at once or a chunk of tokens at a time.

With a vocabulary of 50,000 the logits of 8 x 512 tokens are 0.8 GB in fp32, and training needs them
about three times over: the logits, their upcast or log-softmax, and their gradient. Once blocks are
recomputed they are the peak of the whole step. Both losses here are sums over the target tokens, in
fp32 under every precision; who calls divides by the count of the whole global batch.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE_INDEX = -100


def full_loss(hidden_BSD: Tensor, head_weight_VD: Tensor, targets_BS: Tensor) -> Tensor:
    """Summed cross-entropy in nats (fp32 scalar); the logits [B x S, V] exist in full."""
    logits_BSV = F.linear(hidden_BSD, head_weight_VD)
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def chunked_loss(
    hidden_BSD: Tensor,
    head_weight_VD: Tensor,
    targets_BS: Tensor,
    *,
    chunk_tokens: int,
    expected_grad: Tensor | float = 1.0,
) -> Tensor:
    """The same sum with at most `chunk_tokens` x V logits alive.

    The gradient with respect to the logits, (softmax - one-hot), needs nothing from the backward pass
    but one scalar, so head, loss and both gradients are done chunk by chunk in the forward pass and
    nothing of size tokens x V is kept or computed twice (as Liger Kernel and torchtitan do).

    Args:
        hidden_BSD: final hidden states.
        head_weight_VD: the output head.
        targets_BS: next token ids; `IGNORE_INDEX` counts for nothing.
        chunk_tokens: tokens whose logits exist at one time.
        expected_grad: what backward will receive for this loss: GradScaler's scale / target tokens.
            fp16 needs it: softmax / count is below fp16's smallest number, times the scale it is not.
            A different value in backward is made up for, at the price of that rounding.
    """
    scale = torch.as_tensor(expected_grad, dtype=torch.float32, device=hidden_BSD.device)
    device = hidden_BSD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BSD.dtype
    return _ChunkedLoss.apply(
        hidden_BSD.flatten(0, 1), head_weight_VD, targets_BS.flatten(), chunk_tokens, dtype, scale
    )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, chunk_tokens, dtype, expected_grad):  # type: ignore[no-untyped-def]
        with torch.autocast(hidden_TD.device.type, enabled=False):
            total, hidden_grad, weight_grad = _loss_and_gradients(
                hidden_TD, weight_VD, targets_T, chunk_tokens, dtype, expected_grad
            )
        ctx.save_for_backward(hidden_grad, weight_grad, expected_grad)
        return total

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        hidden_grad, weight_grad, expected_grad = ctx.saved_tensors
        ratio = grad / expected_grad
        return hidden_grad.mul_(ratio), weight_grad.mul_(ratio), None, None, None, None


def _loss_and_gradients(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    chunk_tokens: int,
    dtype: torch.dtype,
    expected_grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight_VD.to(dtype)
    hidden_grad_TD = torch.empty_like(hidden_TD)
    # In fp32 also for bf16 weights: a bf16 sum over many chunks would lose what each adds.
    weight_grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
    total = hidden_TD.new_zeros((), dtype=torch.float32)
    for start in range(0, hidden_TD.shape[0], chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        hidden, targets = hidden_TD[chunk].to(dtype), targets_T[chunk]
        counted = (targets != IGNORE_INDEX).unsqueeze(1)
        index = targets.clamp_min(0).unsqueeze(1)
        logits = (hidden @ weight.T).float()
        log_z = logits.logsumexp(1, keepdim=True)
        total += ((log_z - logits.gather(1, index)) * counted).sum()
        gradient = logits.sub_(log_z).exp_()
        gradient.scatter_add_(1, index, gradient.new_full((), -1.0).expand_as(index))
        gradient.mul_(counted * expected_grad)
        gradient = gradient.to(dtype)
        hidden_grad_TD[chunk] = gradient @ weight
        weight_grad_VD += gradient.T @ hidden
        del logits, gradient  # or they would stand beside the next chunk's
    return total, hidden_grad_TD, weight_grad_VD.to(weight_VD.dtype)


@torch.no_grad()
def token_losses(hidden_TD: Tensor, head_weight_VD: Tensor, targets_T: Tensor, chunk_tokens: int) -> Tensor:
    """Cross-entropy of every token in nats [T], fp32, zero where the target is ignored; no gradient."""
    losses = [
        F.cross_entropy(
            F.linear(hidden, head_weight_VD).float(), targets, ignore_index=IGNORE_INDEX, reduction="none"
        )
        for hidden, targets in zip(hidden_TD.split(chunk_tokens), targets_T.split(chunk_tokens), strict=True)
    ]
    return torch.cat(losses)
