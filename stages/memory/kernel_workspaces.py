"""What a kernel holds inside and frees before it returns, which no operator's result shows.

From reading PyTorch 2.13's sources, named beside each rule. Those of a CPU are held against what the kernels
allocate (tests/memory/test_kernel_workspaces.py); those of CUDA have not been yet.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from stages.model import attention

Target = Literal["cuda", "cpu"]

aten = torch.ops.aten

_Rules = dict[Any, Callable[[tuple[Any, ...], Any, int], int]]
"""For an operator: from its arguments, its result and `processors` to bytes."""


def workspace_bytes(
    target: Target, processors: int, operator: Any, args: tuple[Any, ...], result: Any
) -> int:
    """Bytes that a kernel holds beside its results, at its fullest.

    Args:
        processors: a GPU's multiprocessors; the threads of one operation on a CPU.
    """
    rules = _CUDA_WORKSPACES if target == "cuda" else _CPU_WORKSPACES
    if operator in rules:
        return rules[operator](args, result, processors)
    if target == "cpu" and torch.Tag.pointwise in operator.tags:
        return _casts_to_the_common_type(args)
    return 0


def attention_splits(multiprocessors: int, sequences: int, heads: int) -> int:
    """In how many pieces flash attention's deterministic backward pass adds up the gradient of the queries.

    As many as keep all multiprocessors busy with the heads of the sequences; each is as large as the whole.
    """
    return -(-multiprocessors // (sequences * heads))


# CUDA. Sources: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd, mha_varlen_bwd),
# cuda/attention_backward.cu (_efficient_attention_backward) and cuda/mem_eff_attention/kernel_backward.h
# (workspace_size) of PyTorch 2.13, with deterministic algorithms (stages/training/determinism.py).


def _flash_backward(q: Tensor, k: Tensor, rows: int, rounded_rows: int, splits: int) -> int:
    """fp32 sums of dq and of the softmax's gradient; dk and dv of every query head, to be summed."""
    heads, channels = q.shape[-2:]
    step = 32 if channels <= 128 else 64
    wide = -(-channels // step) * step
    sums = 4 * rounded_rows * heads * (splits * wide + 1)
    expanded = 2 * rows * heads * channels * q.element_size() if k.shape[-2] != heads else 0
    return sums + expanded


def _varlen_flash_backward(args: tuple[Any, ...], _: Any, multiprocessors: int) -> int:
    q, k, cu_seqlens = args[1], args[2], args[6]
    documents = cu_seqlens.shape[0] - 1
    splits = attention_splits(multiprocessors, documents, q.shape[1])
    return _flash_backward(q, k, q.shape[0], q.shape[0] + 128 * documents, splits)


def _sdpa_flash_backward(args: tuple[Any, ...], _: Any, multiprocessors: int) -> int:
    q, k = args[1].transpose(1, 2), args[2].transpose(1, 2)
    batch, positions, heads, _ = q.shape
    splits = attention_splits(multiprocessors, batch, heads)
    return _flash_backward(q, k, batch * positions, batch * -(-positions // 128) * 128, splits)


_BLOCK = 64
"""Queries, keys and channels of the memory-efficient kernel's tiles."""


def _efficient_backward(q: Tensor, sequences: int, positions: int, heads: int) -> int:
    """delta, fp32 for each row and head; fp32 tiles of dq, each with a lock, for sequences of the longest's
    length; of 16 bits and more than 128 channels tiles of dk and dv. In fp32 delta is the sum of a product
    that is made first."""
    channels = q.shape[-1]
    delta = 4 * q.numel() // channels
    tiles = -(-positions // _BLOCK) * -(-channels // _BLOCK)
    sums = tiles * (4 * _BLOCK**2 + 16)
    if q.element_size() == 2 and channels > 128:
        sums += 2 * 4 * 128 * -(-channels // 128) * 128
    product = 4 * q.numel() + delta if q.element_size() == 4 else 0
    return delta + max(sequences * heads * sums, product)


def _varlen_efficient_backward(args: tuple[Any, ...], _: Any, __: int) -> int:
    q, cu_seqlens, max_seqlen_q = args[1], args[6], args[8]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _efficient_backward(q, sequences, int(max_seqlen_q), q.shape[2])


def _sdpa_efficient_backward(args: tuple[Any, ...], _: Any, __: int) -> int:
    q = args[1]
    return _efficient_backward(q, q.shape[0], q.shape[2], q.shape[1])


def _sorted_indices(args: tuple[Any, ...], _: Any, __: int) -> int:
    """embedding_dense_backward sorts its ids: keys and places, twice (native/cuda/Embedding.cu, cub)."""
    return 4 * 8 * args[1].numel()


def _one_more_input(args: tuple[Any, ...], _: Any, __: int) -> int:
    """logsumexp makes exp(x - max(x)) in full (native/ReduceOps.cpp), and sums that."""
    return args[0].numel() * args[0].element_size()


def _contiguous_copy(args: tuple[Any, ...], _: Any, __: int) -> int:
    """roll makes its input contiguous first (native/cuda/TensorTransformations.cu)."""
    return 0 if args[0].is_contiguous() else args[0].numel() * args[0].element_size()


_CUDA_WORKSPACES: _Rules = {
    aten._scaled_dot_product_flash_attention_backward.default: _sdpa_flash_backward,
    torch.ops.torch_attn._varlen_attn_backward.default: _varlen_flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _sdpa_efficient_backward,
    aten._efficient_attention_backward.default: _varlen_efficient_backward,
    aten.embedding_dense_backward.default: _sorted_indices,
    aten.logsumexp.default: _one_more_input,
    aten.roll.default: _contiguous_copy,
}


# CPU. Each thread of its flash kernel holds blocks of scores, in fp32, and in 16 bits as well where those are
# the type of the operands (native/cpu/FlashAttentionKernel.cpp).


def _score_blocks(positions: int) -> tuple[int, int]:
    """Queries and numbers of one block of scores."""
    queries = min(positions, 256 if positions >= 768 else 64 if positions >= 192 else 32)
    return queries, queries * min(positions, 512)


def _flash_forward_blocks(positions: int, channels: int, dtype: torch.dtype) -> int:
    """A block of scores, maximum and sum of its rows, and their outputs."""
    queries, scores = _score_blocks(positions)
    in_16_bits = scores * dtype.itemsize if dtype.itemsize == 2 else 0
    return 4 * (scores + queries * (2 + channels)) + in_16_bits


def _flash_backward_blocks(positions: int, dtype: torch.dtype) -> int:
    """A block of scores, their gradients, and the sum of gradient times output of its rows."""
    queries, scores = _score_blocks(positions)
    in_16_bits = 2 * scores * dtype.itemsize if dtype.itemsize == 2 else 0
    return 4 * (2 * scores + queries) + in_16_bits


def _sdpa_forward(args: tuple[Any, ...], _: Any, threads: int) -> int:
    positions, channels = args[0].shape[2:]
    return threads * _flash_forward_blocks(positions, channels, args[0].dtype)


def _sdpa_backward(args: tuple[Any, ...], _: Any, threads: int) -> int:
    return threads * _flash_backward_blocks(args[1].shape[2], args[1].dtype)


# What stages/model/attention.py's own operators make for a run of rows that are each one document, at most
# the whole batch: what the kernel holds, and its results, before they are copied to where they belong.


def _document_forward(args: tuple[Any, ...], result: Any, threads: int) -> int:
    q_BSHE = args[0]
    results = sum(tensor.numel() * tensor.element_size() for tensor in result)
    return results + threads * _flash_forward_blocks(q_BSHE.shape[1], q_BSHE.shape[3], q_BSHE.dtype)


def _document_backward(args: tuple[Any, ...], result: Any, threads: int) -> int:
    operands, logsumexp = args[:5], args[5]
    q_BSHE = operands[1]
    grads, dtype = sum(tensor.numel() * tensor.element_size() for tensor in result), q_BSHE.dtype
    if attention._backward_is_wide(q_BSHE):
        # All in the type of the log-sum-exp, fp32.
        dtype = logsumexp.dtype
        grads = dtype.itemsize * sum(tensor.numel() for tensor in (*operands, *result))
    blocks = threads * _flash_backward_blocks(q_BSHE.shape[1], dtype)
    return grads + logsumexp.numel() * logsumexp.element_size() + blocks


def _casts_to_the_common_type(args: tuple[Any, ...]) -> int:
    """Operands of another type than the others are cast in full first (TensorIterator::compute_types).

    CUDA's kernels cast number by number.
    """
    # Tensors of no dimension take the type of the others.
    tensors = [argument for argument in args if isinstance(argument, Tensor) and argument.dim()]
    types = {tensor.dtype for tensor in tensors}
    if len(types) < 2:
        return 0
    common = functools.reduce(torch.promote_types, types)
    return common.itemsize * sum(tensor.numel() for tensor in tensors if tensor.dtype != common)


def _casts_of_choices(args: tuple[Any, ...], _: Any, __: int) -> int:
    return _casts_to_the_common_type(args[1:])  # the condition stays what it is


# gloo sums a copy of what it is given, and gathers into one (c10d/ProcessGroupGloo.cpp); NCCL needs neither.


def _copy_to_sum(args: tuple[Any, ...], _: Any, __: int) -> int:
    return args[1].numel() * args[1].element_size()


def _copy_gathered(args: tuple[Any, ...], _: Any, __: int) -> int:
    return args[0].numel() * args[0].element_size()


_CPU_WORKSPACES: _Rules = {
    aten.where.self: _casts_of_choices,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _sdpa_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _sdpa_backward,
    torch.ops.frugal.document_attention.default: _document_forward,
    torch.ops.frugal.document_attention_backward.default: _document_backward,
    aten.logsumexp.default: _one_more_input,
    torch.ops.c10d._reduce_scatter_base_.default: _copy_to_sum,
    torch.ops.c10d._allgather_base_.default: _copy_gathered,
}
