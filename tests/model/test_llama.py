"""The model is Hugging Face's Llama, packed documents included, and its weights follow from the seed."""

import pytest
import torch

from stages.model.hugging_face import to_hugging_face
from stages.model.llama import Llama
from stages.params import ModelParams
from tests.model.small_llama import (
    VOCAB,
    hugging_face_twin,
    relative_error,
    small_llama,
    small_params,
    tokens,
)

SHAPES = {
    "grouped": small_params(),
    "one_kv_head": small_params(num_key_value_heads=1),
    "multi_head": small_params(num_key_value_heads=4),
    "tied": small_params(tie_word_embeddings=True),
    "one_layer": small_params(num_hidden_layers=1),
}
# Two rows of 16; five documents, one of them a whole row's end, one of a single token.
CU_SEQLENS = torch.tensor([0, 5, 6, 16, 19, 32], dtype=torch.int32)


@pytest.fixture(params=[*SHAPES.values()], ids=[*SHAPES])
def shape(request: pytest.FixtureRequest) -> ModelParams:
    params: ModelParams = request.param
    return params


def logits_of(model: Llama, ids: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    return model.lm_head(model(ids, cu_seqlens))


def gradients_as_in_hugging_face(model: Llama) -> dict[str, torch.Tensor]:
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return to_hugging_face(own, model.params)


def test_logits_and_gradients_are_those_of_hugging_face(shape: ModelParams) -> None:
    model = small_llama(shape)
    twin = hugging_face_twin(model)
    ids, weighting = tokens(3, 17), torch.randn(3, 17, VOCAB)
    ours, theirs = logits_of(model, ids), twin(ids).logits
    assert relative_error(ours, theirs) < 2e-6

    (ours * weighting).sum().backward()
    (theirs * weighting).sum().backward()
    gradients = gradients_as_in_hugging_face(model)
    expected = {name: p.grad for name, p in twin.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        assert relative_error(gradients[name], gradient) < 1e-5, name


def test_a_packed_document_is_what_it_is_alone_in_hugging_face(shape: ModelParams) -> None:
    model = small_llama(shape)
    twin = hugging_face_twin(model)
    ids, weighting = tokens(2, 16), torch.randn(32, VOCAB)
    packed = logits_of(model, ids, CU_SEQLENS).flatten(0, 1)
    alone = torch.cat(
        [
            twin(ids.flatten()[None, start:end]).logits[0]
            for start, end in zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True)
        ]
    )
    # RoPE is relative, so positions counted from the row's start or the document's give the same.
    assert relative_error(packed, alone) < 2e-6

    (packed * weighting).sum().backward()
    (alone * weighting).sum().backward()
    for name, gradient in gradients_as_in_hugging_face(model).items():
        expected = twin.get_parameter(name).grad
        assert expected is not None
        assert relative_error(gradient, expected) < 1e-5, name


def test_a_padded_row_is_what_hugging_face_makes_of_it_under_its_mask(shape: ModelParams) -> None:
    model = small_llama(shape)
    ids, mask = tokens(3, 16), torch.zeros(3, 16, dtype=torch.int64)
    for row, length in enumerate((16, 3, 9)):
        mask[row, :length] = 1
    ids = torch.where(mask.bool(), ids, 2)
    expected = hugging_face_twin(model)(ids, attention_mask=mask).logits
    assert relative_error(logits_of(model, ids)[mask.bool()], expected[mask.bool()]) < 2e-6


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changed", range(5))
def test_packed_documents_cannot_see_each_other(changed: int, autocast: torch.dtype | None) -> None:
    model = small_llama(small_params())
    ids = tokens(2, 16)
    start, end = CU_SEQLENS[changed : changed + 2].tolist()
    other = ids.flatten().clone()
    other[start:end] = (other[start:end] + 1) % VOCAB
    with torch.no_grad(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        before = logits_of(model, ids, CU_SEQLENS).flatten(0, 1)
        after = logits_of(model, other.view(2, 16), CU_SEQLENS).flatten(0, 1)
    outside = torch.ones(32, dtype=torch.bool)
    outside[start:end] = False
    assert torch.equal(before[outside], after[outside])
    assert not (before[start:end] == after[start:end]).all(dim=1).any()


@pytest.mark.parametrize("packed", [False, True])
def test_no_position_sees_a_later_one(packed: bool) -> None:
    model = small_llama(small_params())
    ids = tokens(1, 16)
    cu_seqlens = torch.tensor([0, 4, 16], dtype=torch.int32) if packed else None
    later = ids.clone()
    later[0, 10:] = (later[0, 10:] + 1) % VOCAB
    with torch.no_grad():
        before, after = logits_of(model, ids, cu_seqlens)[0], logits_of(model, later, cu_seqlens)[0]
    assert torch.equal(before[:10], after[:10])
    assert not (before[10:] == after[10:]).all(dim=1).any()


def test_documents_in_one_row_are_not_one_document() -> None:
    """Guards the tests above: attention does reach back where nothing forbids it."""
    model = small_llama(small_params())
    ids = tokens(2, 16)
    with torch.no_grad():
        assert not torch.allclose(logits_of(model, ids), logits_of(model, ids, CU_SEQLENS), atol=1e-2)


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_depend_on_the_seed_alone(tied: bool) -> None:
    params = small_params(tie_word_embeddings=tied)

    def weights(seed: int, global_seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(global_seed)
        model = Llama(params, VOCAB)
        before = torch.get_rng_state()
        model.initialise(seed)
        assert torch.equal(torch.get_rng_state(), before), "drew from the global generator"
        return model.state_dict()

    first, second, other = weights(7, 1), weights(7, 2), weights(8, 1)
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        assert weight.dim() < 2 or not torch.equal(weight, other[name]), name


def test_initial_spread() -> None:
    params = small_params(hidden_size=64, intermediate_size=128, initializer_range=0.05, num_hidden_layers=8)
    model = Llama(params, 512)
    model.initialise(0)
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            assert (weight == 1).all(), name
            continue
        # GPT-2 scales what writes into the residual stream by 1 / sqrt(2 x 8 layers) = 1/4.
        expected = 0.05 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.05
        assert float(weight.detach().std()) == pytest.approx(expected, rel=0.06), name
        assert abs(float(weight.detach().mean())) < 0.1 * expected, name


def test_tied_head_is_the_embedding() -> None:
    tied, untied = Llama(small_params(tie_word_embeddings=True), VOCAB), Llama(small_params(), VOCAB)
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert untied.lm_head.weight is not untied.embed_tokens.weight
    sizes = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == VOCAB * 32


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
@pytest.mark.parametrize("packed", [False, True])
def test_autocast_stays_within_what_the_format_allows(
    dtype: torch.dtype, tolerance: float, packed: bool
) -> None:
    model = small_llama(small_params())
    ids, cu_seqlens = tokens(2, 16), CU_SEQLENS if packed else None
    exact = logits_of(model, ids, cu_seqlens)
    exact.sin().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        half = logits_of(model, ids, cu_seqlens)
    assert half.dtype is dtype
    assert 1e-5 < relative_error(half, exact) < tolerance
    # The same upstream gradient, so that only the model's own rounding is judged.
    half.backward(exact.detach().cos().to(dtype))
    for name, parameter in model.named_parameters():
        expected = gradients[name]
        assert parameter.grad is not None and expected is not None
        assert parameter.grad.dtype is torch.float32
        assert relative_error(parameter.grad, expected) < 2 * tolerance, name


def test_autocast_stores_a_norms_output_once_for_all_its_projections() -> None:
    """One cast of each norm's output, not one for each of q, k, v, gate and up."""
    params = small_params(num_hidden_layers=1)
    model = small_llama(params)
    saved: list[torch.Tensor] = []
    ids = tokens(3, 17)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(ids)
    matrix_inputs = {
        t.data_ptr() for t in saved if t.dtype is torch.bfloat16 and t.shape == (3 * 17, params.hidden_size)
    }
    # Inputs of qkv_proj, o_proj and gate_up_proj have this shape.
    assert len(matrix_inputs) == 3
