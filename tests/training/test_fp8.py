"""Products in 8 bits, against the same rounding done in fp64 and against fp32."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.model.llama import Llama
from stages.model.loss import full_loss
from stages.params import ModelParams, VariantParams
from stages.training.compilation import apply_compile
from stages.training.fp8 import BACKWARD_DTYPE, FORWARD_DTYPE, apply_fp8, fp8_linear, fp8_problems, quantise
from stages.training.precision import PrecisionError, PrecisionPolicy, apply_precision, precision_policy
from stages.training.recompute import apply_recompute
from tests.model.small_llama import relative_error, small_llama, small_params, tokens
from tests.training.small_run import bit_equal, distance

# `torch._scaled_mm` on a CPU multiplies the same numbers as a GPU, slowly.
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IDS = tokens(4, 16)
DOCUMENTS = torch.tensor([0, 5, 16, 32, 40, 48, 64], dtype=torch.int32)
SHAPE = {"hidden_size": 64, "intermediate_size": 96}


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def rounded(x: Tensor, mantissa_bits: int, smallest_exponent: int, largest: float) -> Tensor:
    """What `quantise` stands for, from the formats' definition, in fp64."""
    scale = largest / x.detach().double().abs().amax().float()
    scaled = (x.detach().float() * scale).double()
    exponent = torch.frexp(scaled)[1].sub(1).clamp_min(smallest_exponent)  # below it: subnormal
    step = torch.exp2((exponent - mantissa_bits).double())
    return (scaled / step).round().mul(step).clamp(-largest, largest) / scale.double()


def e4m3(x: Tensor) -> Tensor:
    return rounded(x, 3, -6, 448)


def e5m2(x: Tensor) -> Tensor:
    return rounded(x, 2, -14, 57344)


@pytest.mark.parametrize("spread", [1.0, 1e-8, 1e8])
def test_quantise_rounds_as_the_formats_say(spread: float) -> None:
    x = normal(64, 48, scale=spread) * torch.logspace(-6, 0, 48)
    for dtype, oracle in ((FORWARD_DTYPE, e4m3), (BACKWARD_DTYPE, e5m2)):
        in_8_bits, inverse_scale = quantise(x, dtype)
        assert in_8_bits.dtype is dtype
        assert relative_error(in_8_bits.double() * inverse_scale.double(), oracle(x)) < 1e-6


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=12),
    dtype=st.sampled_from([FORWARD_DTYPE, BACKWARD_DTYPE]),
)
def test_quantise_uses_the_whole_range_and_no_more(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values)
    in_8_bits, inverse_scale = quantise(x, dtype)
    found = in_8_bits.float()
    assert found.isfinite().all() and inverse_scale.isfinite()
    if x.abs().amax() > 1e-25:
        largest = torch.finfo(dtype).max
        assert found.abs().amax() == largest
        half_a_step = 2.0 ** -(4 if dtype is FORWARD_DTYPE else 3)
        back = found.double() * inverse_scale.double()
        tolerance = half_a_step * x.double().abs() + float(inverse_scale) * 2.0**-9 + 1e-40
        assert ((back - x.double()).abs() <= tolerance * (1 + 1e-5)).all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_is_seen(bad: float) -> None:
    """A saturating cast makes 448 of inf, and nobody would know."""
    x, weight = normal(16, 32), normal(48, 32, seed=1).requires_grad_()
    x[3, 4] = bad
    assert not fp8_linear(x, weight).isfinite().all()
    x = normal(16, 32).requires_grad_()
    out = fp8_linear(x, weight)
    out.backward(torch.full_like(out, bad))
    assert x.grad is not None and not x.grad.isfinite().any()
    assert weight.grad is not None and not weight.grad.isfinite().any()


def test_zeros_stay_zeros() -> None:
    x, weight = torch.zeros(16, 32, requires_grad=True), torch.zeros(48, 32, requires_grad=True)
    out = fp8_linear(x, weight)
    out.backward(torch.zeros_like(out))
    assert x.grad is not None and weight.grad is not None
    for tensor in (out, x.grad, weight.grad):
        assert (tensor == 0).all()


@pytest.mark.parametrize("tokens_shape", [(32,), (2, 24), (3, 7)], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_products_and_their_gradients(tokens_shape: tuple[int, ...], autocast: bool) -> None:
    """21 tokens are no multiple of 16, which the weight's gradient must be padded to."""
    x = normal(*tokens_shape, 64).requires_grad_()
    weight = normal(48, 64, seed=1, scale=0.1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = fp8_linear(x, weight)
    grad = normal(*tokens_shape, 48, seed=2, scale=1e-5).bfloat16()
    out.backward(grad)
    assert x.grad is not None and weight.grad is not None
    assert (out.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)

    exact_x, exact_weight = e4m3(x).flatten(0, -2), e4m3(weight)
    exact_grad = e5m2(grad).flatten(0, -2)
    bf16 = 2.0**-8  # out and the input's gradient are returned in it
    assert relative_error(out.flatten(0, -2), exact_x @ exact_weight.t()) < bf16
    assert relative_error(x.grad.flatten(0, -2), exact_grad @ exact_weight) < bf16
    assert relative_error(weight.grad, exact_grad.t() @ exact_x) < 1e-5

    # And the rounding itself: half a step of 3 or 2 bits of mantissa, over many terms.
    assert relative_error(out, x.double() @ weight.double().t()) < 0.05
    assert relative_error(x.grad, grad.double() @ weight.double()) < 0.1


def test_one_byte_is_saved_for_each_activation() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x, weight = normal(256, 64).requires_grad_(), normal(48, 64, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fp8_linear(x, weight)
    own = [t for t in saved if t.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()]
    assert sum(t.nbytes for t in own) == 256 * 64 + 4


def calm_llama(**shape: Any) -> Llama:
    """Weights of the size that training has; those of `small_llama` make attention a hard choice."""
    model = small_llama(small_params(**(SHAPE | shape)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.dim() == 2 else 1.0)
    return model


def gradients(model: Llama, autocast: bool = True) -> tuple[float, dict[str, Tensor]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = full_loss(model(IDS, DOCUMENTS), model.lm_head.weight, IDS) / IDS.numel()
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_model_in_fp8_against_fp32() -> None:
    loss, expected = gradients(calm_llama(), autocast=False)
    model = calm_llama()
    names = list(model.state_dict())
    assert apply_fp8(model) == 8
    found_loss, found = gradients(model)
    assert list(model.state_dict()) == names
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert found_loss == pytest.approx(loss, rel=0.01)
    assert 0.001 < distance(found, expected) < 0.15


def test_the_head_is_not_in_8_bits() -> None:
    model = calm_llama(tie_word_embeddings=True)
    apply_fp8(model)
    assert "forward" not in vars(model.lm_head)
    linears = [module for module in model.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert all("forward" in vars(linear) for linear in linears)


def test_it_learns() -> None:
    def last_loss(fp8: bool) -> float:
        model = calm_llama()
        if fp8:
            apply_fp8(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(30):
            loss, _ = gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    assert last_loss(True) == pytest.approx(last_loss(False), rel=0.1)


@pytest.mark.parametrize("policy", ["every_block", "selective", "offload"])
def test_recompute_gives_the_same_bits(policy: str) -> None:
    expected_model, model = calm_llama(), calm_llama()
    for each in (expected_model, model):
        apply_fp8(each)
    apply_recompute(model, VariantParams(micro_batch_size=4, recompute=policy))  # type: ignore[arg-type]
    assert bit_equal(gradients(model)[1], gradients(expected_model)[1])


@pytest.mark.parametrize("policy", ["none", "every_block", "selective"])
def test_a_compiled_block_is_one_graph(
    policy: str, without_code_generation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_model, model = calm_llama(), calm_llama()
    for each in (expected_model, model):
        apply_fp8(each)
    variant = VariantParams(micro_batch_size=4, recompute=policy, compile="blocks")  # type: ignore[arg-type]
    apply_recompute(model, variant)
    apply_compile(model, variant)
    found = gradients(model)[1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    # With the formulas that a compiler is given: of 8 bits, what rounds otherwise in its last bit of fp32 may
    # be another number.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert distance(found, gradients(expected_model)[1]) < 1e-6


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"intermediate_size": 100}, r"model\.intermediate_size is 100 .* use 96 or 112"),
        (
            {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2},
            r"model\.hidden_size is 40 .* use 32 or 48",
        ),
        (
            {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 1, "intermediate_size": 96},
            None,
        ),
        (
            {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3},
            r"2 x model\.num_key_value_heads\) x head size is 72 .* use 64 or 80",
        ),
    ],
    ids=str,
)
def test_sides_that_do_not_fit_are_named(shape: dict[str, int], message: str | None) -> None:
    params: ModelParams = small_params(**({"intermediate_size": 96} | shape))
    policy = PrecisionPolicy("fp8", "cuda", torch.bfloat16, needs_scaler=False)
    if message is None:
        assert fp8_problems(params) == []
        apply_precision(small_llama(params), policy)
    else:
        with pytest.raises(PrecisionError, match=message):
            apply_precision(small_llama(params), policy)


def variant(name: str = "fp8") -> VariantParams:
    return VariantParams(micro_batch_size=1, precision=name)  # type: ignore[arg-type]


def test_a_cpu_is_refused() -> None:
    with pytest.raises(PrecisionError, match=r"fp8 .* training runs on cpu; use fp32 or amp_bf16"):
        precision_policy(variant(), CPU)


@pytest.mark.parametrize(
    ("found", "allowed", "instead"),
    [
        ((7, 5), False, "amp_fp16 or fp32"),
        ((8, 6), False, "amp_bf16 or fp32"),
        ((8, 9), True, ""),
        ((9, 0), True, ""),
    ],
)
def test_the_capability_found_and_needed_is_named(
    found: tuple[int, int], allowed: bool, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    if allowed:
        policy = precision_policy(variant(), CUDA)
        assert (policy.autocast_dtype, policy.weights_dtype) == (torch.bfloat16, torch.float32)
        assert not policy.needs_scaler
    else:
        message = rf"fp8 needs compute capability 8\.9 .*Some GPU has {found[0]}\.{found[1]}; use {instead}"
        with pytest.raises(PrecisionError, match=message):
            precision_policy(variant(), CUDA)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs compute capability 8.9",
)
def test_on_a_gpu_the_products_are_those_of_the_cpu() -> None:
    x, weight, grad = normal(80, 64), normal(48, 64, seed=1), normal(80, 48, seed=2).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        own_x = x.to(device).requires_grad_()
        own_weight = weight.to(device).requires_grad_()
        out = fp8_linear(own_x, own_weight)
        out.backward(grad.to(device))
        assert own_x.grad is not None and own_weight.grad is not None
        results.append([tensor.detach().cpu() for tensor in (out, own_x.grad, own_weight.grad)])
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 5e-3
