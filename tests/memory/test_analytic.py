"""The analytic prediction, against real measured steps and against its own rules."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.data.sequences import MicroBatch
from stages.measure import measure_peak, parameter_count
from stages.memory import MemoryPrediction, predict
from stages.params import ModelParams, Params, TrainingParams, VariantParams, check_params
from stages.training.recompute import apply_recompute
from stages.training.state import initial_state
from stages.training.step import train_step

CPU = torch.device("cpu")
SEQUENCE_LENGTH = 64
GLOBAL_BATCH = 4

REFERENCE = ModelParams(
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=3,
    intermediate_size=3072,
    max_position_embeddings=512,
)


def tiny(variant: dict[str, Any], vocab_size: int) -> Params:
    return check_params(
        {
            "seed": 0,
            "corpus": {"source": "embedded"},
            "tokenizer": {"vocab_size": vocab_size},
            "model": {
                "hidden_size": 96,
                "num_hidden_layers": 4,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "intermediate_size": 256,
                "max_position_embeddings": SEQUENCE_LENGTH,
            },
            "training": {
                "sequence_length": SEQUENCE_LENGTH,
                "global_batch_size": GLOBAL_BATCH,
                "token_budget": 10_000_000,
                "learning_rate": 1e-3,
            },
            "variants": {"v": variant},
        }
    )


def measured_peak(params: Params) -> int:
    """The second step of the engine, which finds the optimizer's state."""
    variant = params.variants["v"]
    state, policy = initial_state(params, "v", CPU)
    apply_recompute(state.model, variant)
    tokens = torch.randint(0, params.tokenizer.vocab_size, (variant.micro_batch_size, SEQUENCE_LENGTH))
    ends = torch.arange(0, tokens.numel() + 1, 32, dtype=torch.int32)
    batch = MicroBatch(tokens, tokens, ends, tokens.numel(), tokens.numel())
    batches = [batch] * params.accumulation_steps("v")
    train_step(state, batches, variant, params.training, policy)
    return measure_peak(CPU, lambda: train_step(state, batches, variant, params.training, policy)).bytes


VARIANTS = [
    {"precision": precision, "recompute": recompute, "loss": loss, "micro_batch_size": micro_batch}
    for precision, recompute, loss, micro_batch in [
        ("fp32", "none", "full", 4),
        ("fp32", "none", "chunked", 1),
        ("fp32", "every_block", "full", 2),
        ("fp32", {"every_n_blocks": 2}, "chunked", 4),
        ("amp_bf16", "none", "full", 4),
        ("amp_bf16", "none", "full", 1),
        ("amp_bf16", "every_block", "chunked", 4),
        ("amp_bf16", {"every_n_blocks": 3}, "full", 2),
    ]
]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine threads wait for each other longer than these sizes take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(str(value) for value in v.values()))
def test_prediction_is_near_the_measured_peak(variant: dict[str, Any], one_thread: None) -> None:
    vocab_size = 4096 if variant["micro_batch_size"] == 4 else 300
    params = tiny(variant | {"loss_chunk_tokens": 64}, vocab_size)
    prediction = predict(params.model, vocab_size, params.training, params.variants["v"], device="cpu")
    assert prediction.peak_bytes == pytest.approx(measured_peak(params), rel=0.05)


def training(global_batch_size: int) -> TrainingParams:
    return TrainingParams(
        sequence_length=512, global_batch_size=global_batch_size, token_budget=10**9, learning_rate=1e-3
    )


def reference_peak(global_batch_size: int = 64, **variant: Any) -> MemoryPrediction:
    recipe = VariantParams(**({"micro_batch_size": global_batch_size} | variant))
    return predict(REFERENCE, 50_000, training(global_batch_size), recipe, device="cuda")


# Peaks that a prototype found by running the step of this model on fake tensors, in GiB. Its
# chunked loss was another one, so only full losses are compared.
@pytest.mark.parametrize(
    ("micro_batch_size", "variant", "expected_gib"),
    [
        (8, {}, 7.7),
        (64, {}, 47.5),
        (8, {"precision": "amp_bf16"}, 6.5),
        (64, {"precision": "amp_bf16"}, 36.2),
        (8, {"precision": "amp_bf16", "recompute": "every_block"}, 4.5),
        (64, {"precision": "amp_bf16", "recompute": "every_block"}, 21.7),
    ],
)
def test_reference_model(micro_batch_size: int, variant: dict[str, Any], expected_gib: float) -> None:
    peak = reference_peak(micro_batch_size, **variant)
    assert peak.peak_bytes / 2**30 == pytest.approx(expected_gib, rel=0.06)
    assert peak.moment == "loss, backward"
    assert peak.logits_and_loss == 3 * 4 * micro_batch_size * 512 * 50_000


def test_what_does_not_depend_on_the_batch_by_hand() -> None:
    """At a tiny micro-batch weights, gradients and AdamW's moments are all: 16 bytes a parameter."""
    recipe = VariantParams(micro_batch_size=1, recompute="every_block", loss="chunked", loss_chunk_tokens=16)
    short = training(1).model_copy(update={"sequence_length": 2})
    peak = predict(REFERENCE, 300, short, recipe)
    parameters = parameter_count(REFERENCE, 300)
    assert peak.parameters == peak.gradients == 4 * parameters
    assert peak.optimizer_state == 8 * parameters
    assert peak.logits_and_loss == 0
    # Rotary tables, ids and targets of 2 tokens, the gradient of their embeddings.
    assert peak.activations == 4 * 512 * 64 + 2 * 8 * 2 + 4 * 2 * 768


def test_each_technique_saves_where_it_should() -> None:
    full = reference_peak().peak_bytes
    assert reference_peak(recompute="every_block").peak_bytes < full
    assert reference_peak(precision="amp_bf16").peak_bytes < full
    assert reference_peak(loss="chunked").peak_bytes < full
    assert reference_peak(micro_batch_size=8).peak_bytes < full
    # Once blocks are recomputed the fp32 logits are the peak: autocast saves next to nothing more.
    recomputed = reference_peak(recompute="every_block").peak_bytes
    both = reference_peak(recompute="every_block", precision="amp_bf16").peak_bytes
    assert both == pytest.approx(recomputed, rel=0.03)
    assert reference_peak(recompute="every_block", precision="amp_bf16", loss="chunked").peak_bytes < both / 3


def test_accumulation_holds_gradients_while_the_next_micro_batch_runs() -> None:
    alone = reference_peak(global_batch_size=8)
    accumulated = reference_peak(global_batch_size=16, micro_batch_size=8)
    assert alone.gradients == 0
    assert accumulated.gradients == accumulated.parameters
    token_ids = 2 * 8 * 8 * 512
    assert accumulated.peak_bytes - alone.peak_bytes == accumulated.parameters + token_ids


def test_tf32_is_fp32_and_fp16_is_bf16_in_size() -> None:
    assert reference_peak(precision="tf32") == reference_peak(precision="fp32")
    assert reference_peak(precision="amp_fp16") == reference_peak(precision="amp_bf16")


variants = st.builds(
    VariantParams,
    micro_batch_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    precision=st.sampled_from(["fp32", "tf32", "amp_bf16", "amp_fp16"]),
    recompute=st.sampled_from(["none", "every_block", {"every_n_blocks": 5}]),
    loss=st.sampled_from(["full", "chunked"]),
    loss_chunk_tokens=st.integers(16, 10_000),
)


@given(variants, st.sampled_from(["auto", "cuda", "cpu"]))
def test_rules(variant: VariantParams, device: Any) -> None:
    def peak(recipe: VariantParams, vocab_size: int = 5000, where: Any = device) -> MemoryPrediction:
        return predict(REFERENCE, vocab_size, training(64), recipe, where)

    prediction = peak(variant)
    parts = [getattr(prediction, name) for name in MemoryPrediction.__dataclass_fields__ if name != "moment"]
    assert sum(parts) == prediction.peak_bytes
    assert all(isinstance(part, int) and part >= 0 for part in parts)
    assert prediction.peak_bytes >= 16 * parameter_count(REFERENCE, 5000)
    assert peak(variant, vocab_size=6000).peak_bytes > prediction.peak_bytes
    assert peak(variant, where="auto").peak_bytes >= peak(variant, where="cuda").peak_bytes
    if variant.micro_batch_size < 32:
        larger = variant.model_copy(update={"micro_batch_size": 2 * variant.micro_batch_size})
        assert peak(larger).peak_bytes >= prediction.peak_bytes
    everything = variant.model_copy(update={"recompute": "every_block"})
    assert peak(everything).peak_bytes <= prediction.peak_bytes
