"""Weights in bfloat16: what is cast, what is not, and what the loss is summed in."""

from pathlib import Path

import pytest
import torch

from stages.model.loss import chunked_loss, full_loss
from stages.params import VariantParams
from stages.training.precision import PrecisionError, PrecisionPolicy, apply_precision, precision_policy
from tests.model.small_llama import relative_error, small_llama, small_params, tokens
from tests.training import small_run as runs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IDS = tokens(4, 16)
DOCUMENTS = torch.tensor([0, 5, 16, 32, 40, 48, 64], dtype=torch.int32)


def policy(name: str = "bf16", device: torch.device = CPU) -> PrecisionPolicy:
    return precision_policy(VariantParams(micro_batch_size=1, precision=name), device)  # type: ignore[arg-type]


def test_the_policy() -> None:
    found = policy()
    assert (found.weights_dtype, found.autocast_dtype, found.needs_scaler) == (torch.bfloat16, None, False)
    assert not found.make_scaler().is_enabled()


@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
def test_the_others_keep_their_weights(name: str) -> None:
    model = small_llama(small_params())
    before = {key: tensor.data_ptr() for key, tensor in model.state_dict().items()}
    apply_precision(model, policy(name))
    assert {key: tensor.data_ptr() for key, tensor in model.state_dict().items()} == before
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_cast_and_rotary_tables_are_not(tied: bool) -> None:
    model = small_llama(small_params(tie_word_embeddings=tied))
    parameters, exact = list(model.parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    apply_precision(model, policy())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert (model.lm_head.weight is model.embed_tokens.weight) is tied
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, exact[key].bfloat16())
    assert model.cos_SE.dtype is model.sin_SE.dtype is torch.float32


def test_everything_in_the_blocks_is_bf16() -> None:
    model = small_llama(small_params())
    apply_precision(model, policy())
    dtypes: set[torch.dtype] = set()
    for block in model.layers:
        block.register_forward_pre_hook(
            lambda _, args: dtypes.update(a.dtype for a in args if a.is_floating_point())
        )
    assert model(IDS, DOCUMENTS).dtype is torch.bfloat16
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_loss_and_gradients_against_fp32(loss: str, packed: bool) -> None:
    cu_seqlens = DOCUMENTS if packed else None

    def backward(model):  # type: ignore[no-untyped-def]
        hidden, weight = model(IDS, cu_seqlens), model.lm_head.weight
        total = (
            chunked_loss(hidden, weight, IDS, chunk_tokens=16)
            if loss == "chunked"
            else full_loss(hidden, weight, IDS)
        )
        (total / IDS.numel()).backward()
        return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    model, exact = small_llama(small_params()), small_llama(small_params())
    for each in (model, exact):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(0.3 if parameter.dim() == 2 else 1.0)
    apply_precision(model, policy())
    exact.load_state_dict(model.state_dict())  # the same rounded weights
    found_loss, found = backward(model)
    expected_loss, expected = backward(exact)
    assert found_loss.dtype is torch.float32, "a sum over thousands of tokens has no room in 8 bits"
    assert relative_error(found_loss, expected_loss) < 2e-3
    assert all(gradient.dtype is torch.bfloat16 for gradient in found.values())
    assert runs.distance(found, expected) < 0.03


def test_a_step_runs(tmp_path: Path) -> None:
    """The engine around it: the optimizer keeps the `Parameter` objects it was made with."""
    run = runs.small_run(tmp_path, runs.small_params({"precision": "bf16", "loss": "chunked"}))
    apply_precision(run.state.model, run.policy)
    before = runs.weights(run.state)
    outcome = run.step()
    assert outcome.loss.dtype is torch.float32 and outcome.loss.isfinite()
    assert not runs.bit_equal(runs.weights(run.state), before)
    assert all(parameter.dtype is torch.bfloat16 for parameter in run.state.model.parameters())


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(PrecisionError, match=r"bf16 needs compute capability 8\.0 .*Tesla V100 has 7\.0"):
        policy("bf16", CUDA)
