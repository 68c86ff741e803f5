"""Next-token cross-entropy, with all logits at once or a chunk of tokens at a time.

With a vocabulary of 50,000 the logits of 8 x 512 tokens are 0.8 GB in fp32, and training as textbooks write
it needs them about three times over: the logits, their upcast or log-softmax, and their gradient. Once blocks
are recomputed they are the peak of the whole step. Here the logits stand once, in the type of the matrix
products, and their gradient is written over them.

The gradient with respect to the logits, softmax - one-hot, needs nothing from the backward pass but one
scalar. So the head, the loss and both gradients are done in the forward pass, chunk by chunk, and nothing of
size tokens x V is kept or computed twice (as Liger Kernel and torchtitan do). Softmax and loss are fp32 under
every precision, for as many rows at a time as a cache holds. Losses are sums over the target tokens; who
calls divides by the count of the whole global batch.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE_INDEX = -100

SOFTMAX_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
"""Logits whose softmax is done at one time, by device: 2 MiB of fp32 stay in a CPU's cache; 64 MiB keep a
GPU busy, and most of them stay in its cache."""
HEAD_ELEMENTS = {"cpu": 2**21, "cuda": 2**22}
"""Of the head's gradient, made at one time in the type of the products before it is added up in fp32."""
ALL = 2**62
"""In one piece."""
LOGIT_COLUMNS = {"cpu": 2**14, "cuda": ALL}
"""Logits of a token that one product makes. oneDNN packs the operands of a 16-bit product for AMX, and of the
head only a part stays in a cache meanwhile. Without AMX, and in fp32, it makes no difference."""
BACKWARD_ROWS = {"cpu": 2**8, "cuda": ALL}
"""Tokens whose gradient one product makes where 16-bit logits have fewer rows than `MANY_ROWS`. With AMX, 512
or 1,024 rows of 50,000 logits take 1.5 to 1.7 times as long at once as by 256; 2,048 are best at once."""
MANY_ROWS = 2**11


def full_loss(
    hidden_BSD: Tensor, head_weight_VD: Tensor, targets_BS: Tensor, *, expected_grad: Tensor | float = 1.0
) -> Tensor:
    """Summed cross-entropy in nats (fp32 scalar); the logits [B x S, V] exist in full.

    `chunked_loss` with all tokens in one chunk.
    """
    tokens = targets_BS.numel()
    return chunked_loss(
        hidden_BSD, head_weight_VD, targets_BS, chunk_tokens=tokens, expected_grad=expected_grad
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
            total, *ctx.gradients = _loss_and_gradients(
                hidden_TD, weight_VD, targets_T, chunk_tokens, dtype, expected_grad
            )
        ctx.expected_grad = expected_grad
        return total

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        if ctx.gradients is None:
            raise RuntimeError(
                "this loss has been through backward: its gradients are made once and given away"
            )
        # Not by save_for_backward: what autograd still holds it would copy into `.grad` and not move there.
        (hidden_grad, weight_grad), ctx.gradients = ctx.gradients, None
        ratio = grad / ctx.expected_grad
        # A GPU multiplies by 1 in less time than the host would wait for the answer.
        if ratio.device.type != "cpu" or ratio != 1:
            hidden_grad.mul_(ratio)
            weight_grad.mul_(ratio)
        return hidden_grad, weight_grad, None, None, None, None


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
    weight_grad_VD = torch.empty_like(weight_VD, dtype=torch.float32)
    total = hidden_TD.new_zeros((), dtype=torch.float32)
    for start in range(0, hidden_TD.shape[0], chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        hidden, targets = hidden_TD[chunk].to(dtype), targets_T[chunk]
        logits = _logits(hidden, weight)
        total += _to_gradient(logits, targets, expected_grad)
        _hidden_gradient(hidden_grad_TD[chunk], logits, weight)
        _add_product(weight_grad_VD, logits, hidden, is_first=start == 0)
        del logits  # or they would stand beside the next chunk's
    return total, hidden_grad_TD, weight_grad_VD.to(weight_VD.dtype)


def _logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    logits_TV = hidden_TD.new_empty(hidden_TD.shape[0], weight_VD.shape[0])
    columns = LOGIT_COLUMNS[hidden_TD.device.type]
    for part_TV, weight in zip(logits_TV.split(columns, dim=1), weight_VD.split(columns), strict=True):
        torch.mm(hidden_TD, weight.T, out=part_TV)
    return logits_TV


def _hidden_gradient(grad_TD: Tensor, gradient_TV: Tensor, weight_VD: Tensor) -> None:
    """Write gradient weight into `grad_TD`."""
    rows = BACKWARD_ROWS[grad_TD.device.type]
    if gradient_TV.element_size() > 2 or gradient_TV.shape[0] >= MANY_ROWS:
        rows = ALL
    for part_TD, gradient in zip(grad_TD.split(rows), gradient_TV.split(rows), strict=True):
        part_TD.copy_(gradient @ weight_VD)


def _to_gradient(logits_TV: Tensor, targets_T: Tensor, expected_grad: Tensor) -> Tensor:
    """Write the gradient of the loss over the logits; returns the loss (fp32 scalar)."""
    total = logits_TV.new_zeros((), dtype=torch.float32)
    counted_T1 = (targets_T != IGNORE_INDEX).unsqueeze(1)
    scale_T1 = counted_T1 * expected_grad
    targets_T1 = targets_T.clamp_min(0).unsqueeze(1)
    rows = max(SOFTMAX_ELEMENTS[logits_TV.device.type] // logits_TV.shape[1], 1)
    for logits, target, counted, scale in zip(
        *(tensor.split(rows) for tensor in (logits_TV, targets_T1, counted_T1, scale_T1)), strict=True
    ):
        x = logits.float()  # fp32 logits themselves: all that follows is in place
        of_target = x.gather(1, target)
        largest = x.amax(1, keepdim=True)
        normaliser = x.sub_(largest).exp_().sum(1, keepdim=True)
        total += ((largest + normaliser.log() - of_target) * counted).sum()
        x.mul_(scale / normaliser).scatter_add_(1, target, -scale)
        if x.dtype is not logits.dtype:
            logits.copy_(x)
        del x  # or it would stand beside the next rows'
    return total


def _add_product(sum_VD: Tensor, gradient_TV: Tensor, hidden_TD: Tensor, *, is_first: bool) -> None:
    """sum += gradient^T hidden, or = where it is the first, without a second tensor of that size."""
    # Whole multiples of 64: tensor cores want every piece to begin at a multiple of 16 bytes.
    rows = max(HEAD_ELEMENTS[sum_VD.device.type] // sum_VD.shape[1] // 64, 1) * 64
    for part_VD, gradient in zip(sum_VD.split(rows), gradient_TV.split(rows, dim=1), strict=True):
        product = gradient.T @ hidden_TD
        if is_first:
            part_VD.copy_(product)
        else:
            part_VD += product


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
