"""Attention against a softmax written out in fp64 under an explicit mask."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.measure.peak_memory import measure_peak
from stages.model import attention
from stages.model.attention import causal_attention
from tests.model.small_llama import relative_error

CPU = torch.device("cpu")


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """[B, S, H, E] in fp64: position t of a row sees s <= t of the same document, nothing else."""
    B, S, H, E = q.shape
    starts = torch.arange(0, B * S, S) if cu_seqlens is None else cu_seqlens[:-1].long()
    document = torch.bucketize(torch.arange(B * S), starts.unique(), right=True).view(B, S)
    position = torch.arange(S)
    sees_BTS = (document[:, :, None] == document[:, None, :]) & (position[:, None] >= position[None, :])
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(B, S, H, E, dtype=torch.float64)
    for head in range(H):
        kv_head = head // (H // k.shape[2])
        scores = torch.einsum("bte,bse->bts", q[:, :, head], k[:, :, kv_head]) / math.sqrt(E)
        weights = scores.masked_fill(~sees_BTS, -torch.inf).softmax(-1)
        out[:, :, head] = torch.einsum("bts,bse->bte", weights, v[:, :, kv_head])
    return out


def inputs(
    B: int, S: int, H: int, K: int, E: int, seed: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, S, heads, E, generator=generator).mul_(1.5).to(dtype).requires_grad_()
        for heads in (H, K, K)
    ]


def compare(qkv: list[torch.Tensor], cu_seqlens: torch.Tensor | None, tolerance: float) -> None:
    out = causal_attention(*qkv, cu_seqlens)  # type: ignore[call-arg]
    expected = exact_attention(*qkv, cu_seqlens)  # type: ignore[call-arg]
    assert out.dtype is qkv[0].dtype
    assert relative_error(out, expected) < tolerance
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    found = torch.autograd.grad(out, qkv, upstream)
    exact = torch.autograd.grad(expected, qkv, upstream.double())
    for name, gradient, exact_gradient in zip("qkv", found, exact, strict=True):
        error = float((gradient.double() - exact_gradient.double()).norm())
        # Against the upstream's norm: a gradient may be exactly 0 (a document of one token has none for q).
        assert error < tolerance * float(upstream.double().norm()), name


@st.composite
def packings(draw: st.DrawFn) -> tuple[int, int, torch.Tensor]:
    """(B, S, cu_seqlens): any documents in any rows; an empty document now and then."""
    B, S = draw(st.integers(1, 4)), draw(st.integers(1, 14))
    inside = draw(st.lists(st.integers(0, B * S), max_size=12))
    starts = sorted([*range(0, B * S + 1, S), *inside])
    return B, S, torch.tensor(starts, dtype=torch.int32)


@settings(max_examples=80, deadline=None)
@given(
    packing=packings(),
    heads=st.sampled_from([(1, 1), (4, 2), (4, 4), (6, 2), (4, 1)]),
    E=st.sampled_from([2, 8, 18]),
    seed=st.integers(0, 2**20),
)
def test_documents_of_any_lengths(
    packing: tuple[int, int, torch.Tensor], heads: tuple[int, int], E: int, seed: int
) -> None:
    B, S, cu_seqlens = packing
    compare(inputs(B, S, *heads, E, seed), cu_seqlens, 5e-6)


@settings(max_examples=25, deadline=None)
@given(
    B=st.integers(1, 3),
    S=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 2), (4, 4)]),
    seed=st.integers(0, 2**20),
)
def test_rows_that_are_one_document_each(B: int, S: int, heads: tuple[int, int], seed: int) -> None:
    compare(inputs(B, S, *heads, 8, seed), None, 5e-6)


@pytest.mark.parametrize("cu_seqlens", [None, [0, 100, 130, 200, 400, 420, 600]], ids=["rows", "packed"])
def test_sequences_longer_than_a_tile_of_the_kernel(cu_seqlens: list[int] | None) -> None:
    starts = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    compare(inputs(3, 200, 4, 2, 16, 0), starts, 5e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 16, 19, 32]], ids=["rows", "packed"])
def test_half_precision(dtype: torch.dtype, tolerance: float, cu_seqlens: list[int] | None) -> None:
    starts = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    compare(inputs(2, 16, 4, 2, 8, 0, dtype), starts, tolerance)


@pytest.mark.parametrize("K", [4, 2, 1])
def test_the_operator_is_a_good_citizen(K: int) -> None:
    """Schema, fake tensors, autograd registration and AOT dispatch, as torch.library checks them."""
    q, k, v = inputs(2, 8, 4, K, 4, 0)
    cu_seqlens = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    torch.library.opcheck(torch.ops.frugal.document_attention, (q, k, v, cu_seqlens))


def test_views_and_strides_do_not_matter() -> None:
    """The model hands over slices of one projection."""
    fused = torch.randn(2, 12, 8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    q, k, v = fused.split([4, 2, 2], dim=2)
    cu_seqlens = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
    out = causal_attention(q, k, v, cu_seqlens)
    assert relative_error(out, exact_attention(q, k, v, cu_seqlens)) < 5e-6
    (found,) = torch.autograd.grad(out.sin().sum(), fused)
    (expected,) = torch.autograd.grad(exact_attention(q, k, v, cu_seqlens).sin().sum(), fused)
    assert relative_error(found, expected) < 5e-6


@pytest.mark.parametrize("packed", [False, True])
def test_the_scores_are_never_built(packed: bool) -> None:
    S = 1536
    qkv = inputs(1, S, 4, 2, 8, 0)
    cu_seqlens = torch.tensor([0, S - 8, S], dtype=torch.int32) if packed else None

    def forward_and_backward() -> None:
        causal_attention(*qkv, cu_seqlens).sum().backward()  # type: ignore[call-arg]

    forward_and_backward()
    for tensor in qkv:
        tensor.grad = None
    held = sum(t.nbytes for t in qkv)
    # One head's scores alone would be S x S x 4 bytes = 9.4 MB; all inputs together are 0.4 MB.
    assert measure_peak(CPU, forward_and_backward).bytes < held + S * S * 4 // 2


def test_the_mask_of_the_oracle() -> None:
    """The oracle itself: weights of a uniform softmax are one over the positions that are seen."""
    zeros, v = torch.zeros(1, 6, 1, 2), torch.eye(6, 2).view(1, 6, 1, 2)
    out = exact_attention(zeros, zeros, v, torch.tensor([0, 2, 6]))
    assert [round(float(x), 4) for x in out[0, :, 0, 0]] == [1.0, 0.5, 0, 0, 0, 0]
    assert all(itertools.starmap(float.__eq__, zip([0.0, 0.5], out[0, :2, 0, 1].tolist(), strict=True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_gradients_in_16_bits_are_no_further_from_the_truth_than_the_kernels_own(
    dtype: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU heads of few channels go backward in fp32 (attention.py)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 48, heads, 32, generator=generator).to(dtype) for heads in (4, 2, 2, 4))
    cu_seqlens = torch.tensor([0, 20, 48, 96], dtype=torch.int32) if packed else None

    def gradients(*operands: torch.Tensor) -> list[torch.Tensor]:
        leaves = [operand.detach().requires_grad_() for operand in operands]
        out = causal_attention(*leaves, cu_seqlens)
        assert out.dtype is operands[0].dtype
        return list(torch.autograd.grad(out, leaves, grad.to(out.dtype)))

    def errors(found: list[torch.Tensor]) -> list[float]:
        return [relative_error(one.double(), other) for one, other in zip(found, truth, strict=True)]

    truth = gradients(q.double(), k.double(), v.double())
    wide = gradients(q, k, v)
    monkeypatch.setattr(attention, "WIDE_BACKWARD_CHANNELS", 0)
    narrow = gradients(q, k, v)
    assert [one.dtype for one in wide] == [dtype] * 3
    assert any(not torch.equal(one, other) for one, other in zip(wide, narrow, strict=True))
    for of_wide, of_narrow in zip(errors(wide), errors(narrow), strict=True):
        assert of_wide < 1.1 * of_narrow
