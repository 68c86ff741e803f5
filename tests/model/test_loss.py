"""The loss in chunks is the loss, keeps what fp16 would lose, and holds little."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from stages.measure.peak_memory import measure_peak
from stages.model import loss as loss_module
from stages.model.loss import IGNORE_INDEX, chunked_loss, full_loss, token_losses
from tests.model.small_llama import relative_error

CPU = torch.device("cpu")
HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def problem(
    B: int, S: int, D: int, V: int, *, seed: int = 0, ignored: float = 0.3
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, S, D, generator=generator).requires_grad_()
    weight = (torch.randn(V, D, generator=generator) / D**0.5).requires_grad_()
    targets = torch.randint(0, V, (B, S), generator=generator)
    dropped = torch.rand(B, S, generator=generator) < ignored
    return hidden, weight, targets.masked_fill(dropped, IGNORE_INDEX)


def exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in fp64, written out from the definition."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_probabilities = torch.log_softmax(hidden @ weight.T, dim=-1)
    counted = [
        -log_probabilities[place][target]
        for place, target in zip(
            [(b, s) for b in range(targets.shape[0]) for s in range(targets.shape[1])],
            targets.flatten().tolist(),
            strict=True,
        )
        if target != IGNORE_INDEX
    ]
    loss = torch.stack(counted).sum() if counted else 0 * log_probabilities.sum()
    hidden_grad, weight_grad = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), hidden_grad, weight_grad


@settings(max_examples=60, deadline=None)
@given(
    B=st.integers(1, 3),
    S=st.integers(1, 9),
    D=st.integers(1, 8),
    V=st.integers(2, 12),
    chunk_tokens=st.integers(1, 30),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    factor=st.sampled_from([1.0, 0.37, 1024.0]),
    expected_grad=st.sampled_from([1.0, 1e-3, 65536.0]),
    seed=st.integers(0, 2**20),
)
def test_value_and_gradients_in_fp32(
    B: int,
    S: int,
    D: int,
    V: int,
    chunk_tokens: int,
    ignored: float,
    factor: float,
    expected_grad: float,
    seed: int,
) -> None:
    """Chunks that do not divide, tokens without a target, any factor before and after."""
    hidden, weight, targets = problem(B, S, D, V, seed=seed, ignored=ignored)
    loss, hidden_grad, weight_grad = exact(hidden, weight, targets)
    for found in (
        full_loss(hidden, weight, targets),
        chunked_loss(hidden, weight, targets, chunk_tokens=chunk_tokens, expected_grad=expected_grad),
    ):
        assert found.dtype is torch.float32
        assert found.shape == ()
        assert float(found.detach()) == pytest.approx(float(loss), rel=1e-5, abs=1e-5)
        gradients = torch.autograd.grad(found * factor, (hidden, weight))
        for gradient, expected in zip(gradients, (hidden_grad, weight_grad), strict=True):
            error = float((gradient.double() - expected * factor).norm())
            assert error <= 3e-6 * factor * (1 + float(expected.norm()))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    hidden, weight, targets = problem(2, 96, 32, 300)
    loss, hidden_grad, weight_grad = exact(hidden, weight, targets)
    eps = HALF[dtype]
    with torch.autocast("cpu", dtype=dtype):
        full = full_loss(hidden, weight, targets)
        chunked = chunked_loss(hidden, weight, targets, chunk_tokens=50)
    full_grads = torch.autograd.grad(full, (hidden, weight))
    chunked_grads = torch.autograd.grad(chunked, (hidden, weight))
    # Both see the same 16-bit logits and sum in fp32, so they agree far beyond the format's precision:
    # a sum kept in bfloat16 would be off by up to 0.4 %.
    assert full.dtype is chunked.dtype is torch.float32
    assert float(chunked.detach()) == pytest.approx(float(full.detach()), rel=1e-6)
    assert float(chunked.detach()) == pytest.approx(float(loss), rel=eps)
    for full_grad, chunked_grad, expected in zip(
        full_grads, chunked_grads, (hidden_grad, weight_grad), strict=True
    ):
        assert chunked_grad.dtype is torch.float32
        assert relative_error(chunked_grad, expected) < 2 * eps
        assert relative_error(chunked_grad, expected) < 1.2 * relative_error(full_grad, expected)


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_nothing_to_predict_is_a_loss_of_zero(loss: str, dtype: torch.dtype) -> None:
    """A micro-batch of FILLER rows: a mean would be 0 / 0."""
    hidden, weight, targets = problem(2, 8, 8, 20, ignored=1.1)
    assert (targets == IGNORE_INDEX).all()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        if loss == "full":
            found = full_loss(hidden, weight, targets)
        else:
            found = chunked_loss(hidden, weight, targets, chunk_tokens=5)
    assert float(found.detach()) == 0
    for gradient in torch.autograd.grad(found, (hidden, weight)):
        assert (gradient == 0).all()


def test_logits_too_large_to_exponentiate() -> None:
    hidden, weight, targets = problem(1, 6, 4, 10, ignored=0)
    with torch.no_grad():
        hidden *= 1e4
    found = chunked_loss(hidden, weight, targets, chunk_tokens=4)
    expected, hidden_grad, weight_grad = exact(hidden, weight, targets)
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-5)
    for gradient, reference in zip(
        torch.autograd.grad(found, (hidden, weight)), (hidden_grad, weight_grad), strict=True
    ):
        assert relative_error(gradient, reference) < 1e-5


def test_fp16_needs_the_scale_inside() -> None:
    """Divided by the tokens of a large batch, softmax is below fp16's smallest number (6e-8)."""
    hidden, weight, targets = problem(2, 48, 16, 500, ignored=0)
    target_tokens, scale = 500_000, 65536.0
    _, hidden_grad, weight_grad = exact(hidden, weight, targets)

    def errors(expected_grad: float) -> list[float]:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = chunked_loss(hidden, weight, targets, chunk_tokens=32, expected_grad=expected_grad)
        scaled = torch.autograd.grad(loss / target_tokens * scale, (hidden, weight))
        return [
            relative_error(found / scale * target_tokens, expected)
            for found, expected in zip(scaled, (hidden_grad, weight_grad), strict=True)
        ]

    assert max(errors(scale / target_tokens)) < 2e-3
    assert min(errors(1 / target_tokens)) > 0.05  # without the scale most of the softmax is lost


def test_fp16_keeps_the_unlikely_tokens_only_when_scaled() -> None:
    """A model that is sure: most of softmax is below 6e-8, yet those rows have a gradient."""
    hidden, weight, targets = problem(1, 12, 16, 60, ignored=0)
    with torch.no_grad():
        weight /= weight.norm(dim=1, keepdim=True)
        hidden.copy_(25 * weight[targets])
    _, _, expected = exact(hidden, weight, targets)

    def weight_grad(expected_grad: float) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = chunked_loss(hidden, weight, targets, chunk_tokens=16, expected_grad=expected_grad)
        (gradient,) = torch.autograd.grad(loss * 65536.0, weight)
        return gradient / 65536.0

    kept, lost = weight_grad(65536.0), weight_grad(1.0)
    assert kept.isfinite().all()
    size = expected.norm(dim=1)
    tiny = (size > 1e-10) & (size < 1e-7)
    assert tiny.sum() >= 3, "the test's data must have such rows"
    assert relative_error(kept[tiny], expected[tiny]) < 0.05
    assert relative_error(lost[tiny], expected[tiny]) > 0.2


def test_a_second_backward_is_refused_and_not_wrong() -> None:
    """Backward scales the gradients in place and gives them away."""
    hidden, weight, targets = problem(1, 6, 4, 10)
    loss = chunked_loss(hidden, weight, targets, chunk_tokens=4)
    loss.backward(torch.tensor(2.0), retain_graph=True)
    with pytest.raises(RuntimeError, match="has been through backward"):
        loss.backward(torch.tensor(2.0))


def peak_above_inputs(kind: str, dtype: torch.dtype) -> int:
    hidden, weight, targets = problem(4, 256, 16, 2048, ignored=0.1)

    def forward_and_backward() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            if kind == "full":
                found = full_loss(hidden, weight, targets)
            else:
                found = chunked_loss(hidden, weight, targets, chunk_tokens=64)
        found.backward()

    before = measure_peak(CPU, lambda: None).bytes
    return measure_peak(CPU, forward_and_backward).bytes - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_holds_the_logits_once_and_chunked_a_chunk_of_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_bytes = 4 * 256 * 2048 * dtype.itemsize
    gradients_bytes = (4 * 256 + 2048) * 16 * 4
    softmax_bytes = 2**16 * 4
    monkeypatch.setattr(loss_module, "SOFTMAX_ELEMENTS", {"cpu": 2**16})
    packed_by_onednn_bytes = 2**20
    others = 3 * gradients_bytes + softmax_bytes + packed_by_onednn_bytes
    assert logits_bytes < peak_above_inputs("full", dtype) < logits_bytes + others
    assert peak_above_inputs("chunked", dtype) < logits_bytes / 16 + others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("many_rows", [4, 1000])
def test_products_in_pieces_are_the_products(
    dtype: torch.dtype, many_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that divide neither the vocabulary, nor the tokens of a chunk, nor those of the last one."""
    hidden, weight, targets = (tensor.detach() for tensor in problem(2, 10, 8, 23))
    inputs = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
    monkeypatch.setattr(loss_module, "LOGIT_COLUMNS", {"cpu": 5})
    monkeypatch.setattr(loss_module, "BACKWARD_ROWS", {"cpu": 3})
    monkeypatch.setattr(loss_module, "MANY_ROWS", many_rows)
    found = chunked_loss(*inputs, targets, chunk_tokens=8)
    found.backward()
    loss, *gradients = exact(*inputs, targets)
    tolerance = 4 * HALF.get(dtype, 2.0**-22)
    assert float(found.detach()) == pytest.approx(float(loss), rel=tolerance)
    for tensor, expected in zip(inputs, gradients, strict=True):
        assert tensor.grad is not None
        assert relative_error(tensor.grad, expected) < tolerance


@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 20), chunk_tokens=st.integers(1, 25), seed=st.integers(0, 2**20))
def test_token_losses(T: int, chunk_tokens: int, seed: int) -> None:
    hidden, weight, targets = problem(1, T, 6, 9, seed=seed)
    found = token_losses(hidden[0], weight, targets[0], chunk_tokens)
    assert found.dtype is torch.float32
    assert not found.requires_grad
    log_probabilities = torch.log_softmax(hidden[0].detach().double() @ weight.detach().double().T, dim=-1)
    for t, target in enumerate(targets[0].tolist()):
        expected = 0.0 if target == IGNORE_INDEX else -float(log_probabilities[t, target])
        assert float(found[t]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


# Why there is a loss of our own.

needs_linear_cross_entropy = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy") or not hasattr(torch.nn, "LinearCrossEntropyOptions"),
    reason=f"torch {torch.__version__} has no chunked F.linear_cross_entropy (2.13 has)",
)


@needs_linear_cross_entropy
def test_torchs_own_rounds_the_loss_to_bfloat16() -> None:
    hidden, weight, targets = problem(2, 128, 64, 2048, ignored=0)
    hidden_16, weight_16 = hidden.detach().bfloat16(), weight.detach().bfloat16()
    loss = F.cross_entropy(hidden_16.double().flatten(0, 1) @ weight_16.double().T, targets.flatten())
    theirs = F.linear_cross_entropy(
        hidden_16.flatten(0, 1),
        weight_16,
        targets.flatten(),
        options=torch.nn.LinearCrossEntropyOptions(),  # type: ignore[attr-defined]
    )
    ours = chunked_loss(hidden_16, weight_16, targets, chunk_tokens=256) / targets.numel()
    assert theirs.dtype is torch.bfloat16
    assert ours.dtype is torch.float32
    error, own_error = (abs(float(found) - float(loss)) for found in (theirs, ours))
    # Between 8 and 16 bfloat16 has steps of 1/16; ours differs by the rounding of single logits.
    assert error > 20 * own_error
    assert own_error < 1e-3


@needs_linear_cross_entropy
def test_torchs_own_gives_no_gradients_under_fp16_scaling() -> None:
    """Its loss is fp16, which ends at 65504: GradScaler's first scale arrives as infinity."""
    hidden, weight, targets = problem(1, 256, 32, 1024, ignored=0)
    scale = 65536.0

    def gradients(own: bool) -> tuple[Tensor, ...]:
        hidden_16, weight_16 = (t.detach().half().requires_grad_() for t in (hidden, weight))
        if own:
            expected_grad = scale / targets.numel()
            loss = chunked_loss(hidden_16, weight_16, targets, chunk_tokens=256, expected_grad=expected_grad)
            loss = loss / targets.numel()
        else:
            loss = F.linear_cross_entropy(
                hidden_16.flatten(0, 1),
                weight_16,
                targets.flatten(),
                options=torch.nn.LinearCrossEntropyOptions(),  # type: ignore[attr-defined]
            )
        # GradScaler multiplies in fp32; the gradient is handed back in the loss's type.
        return torch.autograd.grad(loss.float() * scale, (hidden_16, weight_16))

    theirs = gradients(own=False)
    assert not any(gradient.isfinite().any() for gradient in theirs)
    assert any(gradient.isnan().any() for gradient in theirs)  # infinity x 0
    _, hidden_grad, weight_grad = exact(hidden, weight, targets)
    for found, expected in zip(gradients(own=True), (hidden_grad, weight_grad), strict=True):
        assert relative_error(found / scale * targets.numel(), expected) < 5e-3


@needs_linear_cross_entropy
def test_torchs_own_leaves_autocast() -> None:
    """Under autocast it is exact because it computes in fp32: the 16-bit matrix products are lost."""
    hidden, weight, targets = problem(2, 128, 64, 1024, ignored=0)
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]

    def loss() -> Tensor:
        return F.linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), options=options)

    plain = torch.autograd.grad(loss(), (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss()
    assert all(
        torch.equal(a, b) for a, b in zip(torch.autograd.grad(inside, (hidden, weight)), plain, strict=True)
    )
