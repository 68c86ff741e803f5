"""Attention on a CPU: documents of any length in one batch, grouped heads, softmax in fp32, little memory.

PyTorch's flash kernel for CPUs knows one length for all sequences, and spends time on scores that a causal
mask throws away and on products of its own making. Here a block of queries meets all keys that it may see at
once, so that a softmax needs no second look, and everything is a batched matrix product or a fused kernel of
PyTorch's. Nothing of size S x S ever stands: the scores of one block are made, used and forgotten, and made
again in the backward pass (Dao et al. 2022, "FlashAttention"), for which q, k and v are all that is kept.

An operator of our own is opaque to `torch.compile`: how many documents a batch holds recompiles nothing.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_QUERIES = 64
"""Of a document that is n blocks long, (n + 1) / 2n of all scores are computed."""
_BLOCK_SCORES = 2**19
"""Scores that stand at one time, in fp32: 2 MiB, which caches hold. A block is not divided by heads: where
heads x positions exceed 8,192, it needs more."""


@torch.library.custom_op("frugal::document_attention", mutates_args=(), device_types="cpu")
@torch.autocast("cpu", enabled=False)
def document_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Softmax(q k^T / sqrt(E)) v over earlier positions of the same document, as [B, S, H, E].

    Args:
        q: queries [B, S, H, E].
        k: keys [B, S, K, E]; K divides H, head h reads key-value head h // (H / K).
        v: values [B, S, K, E].
        cu_seqlens: int32 [documents + 1], starts in the flattened B x S tokens, with every row's start
            among them; None when each row is one document.
    """
    K, group, scale = k.shape[2], q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    out = q.new_empty(q.shape)
    for piece in _pieces(q, cu_seqlens):
        queries = _by_kv_head(q[piece], K).mul_(scale)
        keys, values = _by_kv_head(k[piece], K), _by_kv_head(v[piece], K)
        results = torch.empty_like(queries)
        for start, end in _blocks(keys):
            block = slice(start * group, end * group)
            weights = _weights(queries[:, block], keys, start, end)
            torch.bmm(weights, values[:, :end], out=results[:, block])
            del weights  # or it would stand beside the next block's
        _write_by_position(results, out[piece])
    return out


@torch.library.custom_op("frugal::document_attention_backward", mutates_args=(), device_types="cpu")
@torch.autocast("cpu", enabled=False)
def _document_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    K, group, scale = k.shape[2], q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    for piece in _pieces(q, cu_seqlens):
        queries, upstream = _by_kv_head(q[piece], K).mul_(scale), _by_kv_head(grad_out[piece], K)
        keys, values = _by_kv_head(k[piece], K), _by_kv_head(v[piece], K)
        queries_grad = torch.empty_like(queries)
        keys_grad, values_grad = torch.zeros_like(keys), torch.zeros_like(values)
        for start, end in _blocks(keys):
            block = slice(start * group, end * group)
            weights = _weights(queries[:, block], keys, start, end)
            values_grad[:, :end].baddbmm_(weights.mT, upstream[:, block])
            scores_grad = torch.bmm(upstream[:, block], values[:, :end].mT)
            # In place, row by row: from the gradient of the weights to that of the scores.
            torch._softmax_backward_data(scores_grad, weights, -1, torch.float32, grad_input=scores_grad)
            keys_grad[:, :end].baddbmm_(scores_grad.mT, queries[:, block])
            torch.bmm(scores_grad, keys[:, :end], out=queries_grad[:, block])
            del weights, scores_grad
        queries_grad.mul_(scale)
        for grad, found in zip(grads, (queries_grad, keys_grad, values_grad), strict=True):
            _write_by_position(found, grad[piece])
    return grads


def _weights(queries: Tensor, keys: Tensor, start: int, end: int) -> Tensor:
    """Softmax of queries `start` to `end` over keys 0 to `end`, [heads, queries x group, end]."""
    scores = torch.bmm(queries, keys[:, :end].mT)
    heads, length = keys.shape[0], end - start
    future = torch.full((length, length), -torch.inf).triu_(1)
    scores.view(heads, length, -1, end)[..., start:].add_(future[:, None, :])
    return torch.softmax(scores, -1, out=scores)


def _blocks(keys: Tensor) -> Iterator[tuple[int, int]]:
    """First and last position of each block of queries."""
    length = keys.shape[1]
    return ((start, min(start + _BLOCK_QUERIES, length)) for start in range(0, length, _BLOCK_QUERIES))


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """fp32 [R x K, L x G, E] of [R, L, K x G, E]: what belongs to one key-value head is one matrix."""
    R, _, _, E = x.shape
    by_head = x.unflatten(2, (kv_heads, -1)).transpose(1, 2)
    return by_head.to(torch.float32, memory_format=torch.contiguous_format, copy=True).view(
        R * kv_heads, -1, E
    )


def _write_by_position(x: Tensor, to: Tensor) -> None:
    """The inverse of `_by_kv_head`, written where it belongs: as a tensor of its own it would be a copy."""
    R, L, heads, E = to.shape
    kv_heads = x.shape[0] // R
    by_head = x.view(R, kv_heads, L, heads // kv_heads, E)
    to.unflatten(2, (kv_heads, -1)).copy_(by_head.transpose(1, 2))


def _pieces(q: Tensor, cu_seqlens: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Rows and positions of every piece that is done at one time; rows that are one document go together."""
    B, S, H, _ = q.shape
    together = _rows_together(S, H)
    runs = [((0, B), (0, S))] if cu_seqlens is None else _documents(cu_seqlens.tolist(), S)
    for (first, last), positions in runs:
        for row in range(first, last, together):
            yield slice(row, min(row + together, last)), slice(*positions)


def _rows_together(positions: int, heads: int) -> int:
    return max(_BLOCK_SCORES // (heads * positions * min(positions, _BLOCK_QUERIES)), 1)


def _documents(starts: list[int], row_length: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """(first and last row, first and last position) of every run of rows that are each one document, and of
    every document that is less than a row."""
    whole_from = None
    for start, end in itertools.pairwise(starts):
        row, position = divmod(start, row_length)
        if end - start == row_length:
            whole_from = row if whole_from is None else whole_from
            continue
        if whole_from is not None:
            yield (whole_from, row), (0, row_length)
            whole_from = None
        if end > start:
            yield (row, row + 1), (position, position + end - start)
    if whole_from is not None:
        yield (whole_from, starts[-1] // row_length), (0, row_length)


def bytes_inside(q: Tensor, k: Tensor, *, backward: bool) -> int:
    """What the operator holds beside its results at its fullest, where rows are one document each.

    fp32 copies of a piece's inputs and results, and the scores of a block, for backward twice.
    """
    B, S, H, E = q.shape
    rows = min(_rows_together(S, H), B)
    queries, keys = (rows * S * heads * E for heads in (H, k.shape[2]))
    last = S - S % _BLOCK_QUERIES
    scores = rows * H * max(min(last, _BLOCK_QUERIES) * last, (S - last) * S)
    return 4 * (3 * queries + 4 * keys + 2 * scores if backward else 2 * queries + 2 * keys + scores)


@document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return q.new_empty(q.shape)


@_document_attention_backward.register_fake
def _(grad_out, q, k, v, cu_seqlens):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens)


def _backward(ctx, grad_out):  # type: ignore[no-untyped-def]
    return *_document_attention_backward(grad_out, *ctx.saved_tensors), None


document_attention.register_autograd(_backward, setup_context=_save_for_backward)
