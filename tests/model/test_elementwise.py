"""Gradients written by hand are those of the plain formulas, and keep less."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from stages.model.elementwise import RMSNorm, rotary_heads, swiglu
from stages.model.llama import rotary_tables
from tests.model.small_llama import relative_error, small_params

B, S, H, K, E = 2, 5, 4, 2, 8

Operation = Callable[..., Tensor | tuple[Tensor, ...]]


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    norm = RMSNorm(x.shape[-1], eps=1e-5)
    norm.weight = nn.Parameter(weight)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def plainly_normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def tables(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = rotary_tables(small_params(hidden_size=H * E, num_attention_heads=H, num_key_value_heads=K))
    return cos[:S].clone().to(dtype), sin[:S].clone().to(dtype)


def rotated(qkv: Tensor) -> tuple[Tensor, ...]:
    return rotary_heads(qkv, *tables(qkv.dtype), H, K)


def plainly_rotated(qkv: Tensor) -> tuple[Tensor, ...]:
    """Each pair of channels as a complex number, turned by its position's angle."""
    q, k, v = qkv.split([H, K, K], dim=2)
    cos, sin = tables(qkv.dtype)
    turn = torch.complex(cos[:, None, : E // 2], sin[:, None, E // 2 :])
    found = []
    for x in (q, k):
        y = torch.complex(*x.chunk(2, dim=-1)) * turn
        found.append(torch.cat((y.real, y.imag), dim=-1))
    return *found, v


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_of_its_own(gate_up: Tensor) -> Tensor:
    """Its backward writes over what it is given: here a leaf, in the model a projection's result."""
    return swiglu(gate_up * 1)


OPERATIONS: dict[str, tuple[Operation, Operation, list[tuple[int, ...]]]] = {
    "rms_norm": (normed, plainly_normed, [(B, S, 12), (12,)]),
    "rotary_heads": (rotated, plainly_rotated, [(B, S, H + 2 * K, E)]),
    "swiglu": (swiglu_of_its_own, plain_swiglu, [(B, S, 14)]),
}


def results_and_gradients(operation: Operation, inputs: list[Tensor]) -> list[Tensor]:
    results = operation(*inputs)
    results = (results,) if isinstance(results, Tensor) else results
    grads = [random(*result.shape, dtype=result.dtype, seed=9 + n) for n, result in enumerate(results)]
    return [*results, *torch.autograd.grad(results, inputs, grads)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_and_gradients_are_those_of_the_plain_formula(name: str) -> None:
    by_hand, plain, shapes = OPERATIONS[name]
    inputs = [random(*shape, seed=n) for n, shape in enumerate(shapes)]
    found, expected = results_and_gradients(by_hand, inputs), results_and_gradients(plain, inputs)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.is_contiguous()
        # Rotary tables are fp32, whatever the heads are.
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    if name != "swiglu":  # which can go backward once
        assert torch.autograd.gradcheck(by_hand, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_type_is_further_from_the_truth_than_the_plain_formula_in_it(
    name: str, dtype: torch.dtype
) -> None:
    by_hand, plain, shapes = OPERATIONS[name]
    inputs = [random(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = results_and_gradients(plain, exact)
    for found, truth in zip(results_and_gradients(by_hand, inputs), expected, strict=True):
        assert found.dtype is dtype
        # Two roundings of results of about 1; gradients of a weight are sums over rows.
        assert relative_error(found.double(), truth) < 4 * torch.finfo(dtype).eps


@settings(max_examples=50, deadline=None)
@given(st.integers(-12, 12), st.integers(1, 40), st.integers(0, 5))
def test_rms_norm_of_any_magnitude_is_torchs(exponent: int, width: int, seed: int) -> None:
    x = random(3, width, dtype=torch.float32, seed=seed).detach() * 10.0**exponent
    weight = random(width, dtype=torch.float32, seed=seed + 1).detach()
    expected = F.rms_norm(x, (width,), weight, eps=1e-5)
    torch.testing.assert_close(normed(x, weight), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPERATIONS)
def test_little_is_kept_for_backward(name: str) -> None:
    by_hand, plain, shapes = OPERATIONS[name]
    inputs = [random(*shape, dtype=torch.float32, seed=n) for n, shape in enumerate(shapes)]

    def kept_bytes(operation: Operation) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _held = operation(*inputs)
        for tensor in inputs:
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        return sum(kept.values())

    table, gate_and_up = 2 * S * E * 4, B * S * 14 * 4
    expected = {"rms_norm": B * S * 4, "rotary_heads": table, "swiglu": gate_and_up}[name]
    assert kept_bytes(by_hand) == expected
    if name == "rms_norm":
        assert kept_bytes(plain) > expected
    if name == "swiglu":
        assert kept_bytes(plain) + gate_and_up > expected  # silu(gate), beside what it was given


def test_rotary_heads_hold_no_part_of_what_they_came_from() -> None:
    qkv = random(B, S, H + 2 * K, E)
    for tensor in rotated(qkv):
        assert tensor.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_second_backward_of_swiglu_is_refused() -> None:
    out = swiglu_of_its_own(random(B, S, 14)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_what_is_compiled_is_the_plain_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {name: [random(*s, seed=n) for n, s in enumerate(o[2])] for name, o in OPERATIONS.items()}
    eager = {name: results_and_gradients(o[0], inputs[name]) for name, o in OPERATIONS.items()}
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    for name, (by_hand, _, _) in OPERATIONS.items():
        results = by_hand(*inputs[name])
        first = results if isinstance(results, Tensor) else results[0]
        assert first.grad_fn is not None
        assert not first.grad_fn.name().startswith(("_RMSNorm", "_Rotary", "_SwiGLU")), name
        for one, other in zip(results_and_gradients(by_hand, inputs[name]), eager[name], strict=True):
            torch.testing.assert_close(one, other)
