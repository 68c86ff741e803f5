"""The analytic prediction, against real measured steps and against its own rules."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.data.sequences import MicroBatch
from stages.measure import measure_peak, parameter_count
from stages.measure.peak_memory import live_cpu_blocks
from stages.memory import MemoryPrediction, predict
from stages.params import ModelParams, Params, TrainingParams, VariantParams, check_params
from stages.training.precision import apply_precision
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


def tiny(variant: dict[str, Any], vocab_size: int, max_grad_norm: float | None = 1.0) -> Params:
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
                "max_grad_norm": max_grad_norm,
            },
            "variants": {"v": variant},
        }
    )


def measured_peak(params: Params) -> int:
    """The second step of the engine, which finds the optimizer's state.

    What other tests have left alive is taken off.
    """
    variant = params.variants["v"]
    alive_before = sum(live_cpu_blocks().values())
    if variant.precision == "fp8":
        # A CPU does these products too, only no faster: the policy that refuses them is passed by.
        plain = params.model_copy(
            update={"variants": {"v": variant.model_copy(update={"precision": "amp_bf16"})}}
        )
        state, policy = initial_state(plain, "v", CPU)
        apply_precision(state.model, replace(policy, name="fp8"))
    else:
        state, policy = initial_state(params, "v", CPU)
    apply_recompute(state.model, variant)
    tokens = torch.randint(0, params.tokenizer.vocab_size, (variant.micro_batch_size, SEQUENCE_LENGTH))
    ends = torch.arange(0, tokens.numel() + 1, 32, dtype=torch.int32)
    batch = MicroBatch(tokens, tokens, ends, tokens.numel(), tokens.numel())
    batches = [batch] * params.accumulation_steps("v")
    train_step(state, batches, variant, params.training, policy)
    peak = measure_peak(CPU, lambda: train_step(state, batches, variant, params.training, policy))
    return peak.bytes - alive_before


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
        ("fp32", "selective", "full", 4),
        ("amp_bf16", "selective", "chunked", 4),
        ("bf16", "none", "full", 4),
        ("bf16", "none", "chunked", 1),
        ("bf16", "every_block", "full", 4),
        ("bf16", "selective", "full", 2),
        ("fp8", "none", "full", 4),
        ("fp8", "every_block", "chunked", 1),
    ]
]
VARIANTS += [
    {"optimizer": "adamw_8bit", "micro_batch_size": 4},
    {"optimizer": "adamw_8bit", "recompute": "every_block", "loss": "chunked", "micro_batch_size": 4},
    {"optimizer": "adamw_8bit", "precision": "bf16", "micro_batch_size": 4},
    {"optimizer": "muon", "micro_batch_size": 4},
    {"optimizer": "muon", "recompute": "every_block", "loss": "chunked", "micro_batch_size": 1},
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


# An update's temporaries weigh more here than in any real model: a wider margin where one is the peak.
@pytest.mark.parametrize(
    ("variant", "margin"),
    [
        ({}, 0.05),
        ({"loss": "chunked"}, 0.05),
        ({"precision": "amp_bf16"}, 0.05),
        ({"optimizer": "adamw_8bit"}, 0.1),
        ({"precision": "bf16"}, 0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [300, 4096])
def test_optimizer_in_backward_against_the_measured_peak(
    variant: dict[str, Any], margin: float, vocab_size: int, one_thread: None
) -> None:
    techniques = {"micro_batch_size": 4, "recompute": "every_block", "loss_chunk_tokens": 64}
    techniques |= {"optimizer_in_backward": True}
    params = tiny(techniques | variant, vocab_size, max_grad_norm=None)
    prediction = predict(params.model, vocab_size, params.training, params.variants["v"], device="cpu")
    assert prediction.peak_bytes == pytest.approx(measured_peak(params), rel=margin)


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


def test_bytes_of_the_optimizers_by_hand() -> None:
    D, F, V, kv, layers = 768, 3072, 50_000, 192, 12
    gains = D * (2 * layers + 1)
    block = D * (D + 2 * kv) + D * D + 3 * D * F
    numbers = layers * block + 2 * V * D + gains
    assert reference_peak().optimizer_state == 8 * numbers
    # Nothing is updated at this peak, so the state stands alone.
    assert reference_peak(precision="bf16").optimizer_state == 4 * numbers
    # A row of 768 numbers has three scales, one of 3072 twelve: always one for 256.
    quantized = 2 * (numbers - gains) * (1 + 4 / 256) + 8 * gains
    assert reference_peak(optimizer="adamw_8bit").optimizer_state == quantized
    leanest = reference_peak(optimizer="adamw_8bit", precision="bf16")
    assert leanest.optimizer_state == quantized - 4 * gains
    assert reference_peak(optimizer="muon").optimizer_state == 4 * layers * block + 8 * (2 * V * D + gains)


def test_pure_bf16_halves_what_the_weights_are_in() -> None:
    half, full = reference_peak(precision="bf16"), reference_peak(precision="amp_bf16")
    assert 2 * half.parameters == full.parameters
    assert half.activations < full.activations, "no 16-bit copies, and a residual stream in 16 bits"
    assert half.logits_and_loss == full.logits_and_loss, "the loss is in fp32 under every precision"


def test_fp8_keeps_the_inputs_of_products_in_eight_bits() -> None:
    """And no 16-bit copies of the blocks' weights; beside the attention's output stands an 8-bit copy."""
    saved = reference_peak(precision="amp_bf16").peak_bytes - reference_peak(precision="fp8").peak_bytes
    tokens, block = 64 * 512, 768 * (768 + 2 * 192) + 768 * 768 + 3 * 768 * 3072
    assert saved == 12 * (tokens * (2 * 768 + 3072 - 768) + 2 * block)


def test_a_budget_lies_between_none_and_every_block() -> None:
    peaks = [
        reference_peak(recompute={"budget": x}, compile="blocks").peak_bytes for x in (0, 0.25, 0.5, 0.75, 1)
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] == reference_peak(recompute="every_block").peak_bytes
    assert peaks[-1] == reference_peak().peak_bytes
    assert peaks[2] == pytest.approx((peaks[0] + peaks[-1]) / 2, rel=1e-6)


def test_selective_lies_between_none_and_every_block() -> None:
    kinds = ["every_block", "selective", "none"]
    for precision in ("fp32", "amp_bf16", "bf16"):
        peaks = [reference_peak(precision=precision, recompute=kind).peak_bytes for kind in kinds]
        assert peaks[0] < peaks[1] < peaks[2]


def test_offload_does_not_grow_with_the_layers() -> None:
    def activations(layers: int, recompute: Any) -> int:
        model = REFERENCE.model_copy(update={"num_hidden_layers": layers})
        recipe = VariantParams(micro_batch_size=8, recompute=recompute)
        return predict(model, 50_000, training(8), recipe, "cuda").activations

    assert activations(24, "offload") == activations(12, "offload")
    assert activations(2, "offload") == activations(2, "none")
    assert activations(24, "none") > 1.9 * activations(12, "none")


def test_optimizer_in_backward_saves_the_gradients() -> None:
    """Where nothing else is large, of the 16 bytes a parameter has only 12 are left."""
    techniques: dict[str, Any] = {"recompute": "every_block", "loss": "chunked", "loss_chunk_tokens": 16}
    short = training(1).model_copy(update={"sequence_length": 2})

    def peak(**more: Any) -> MemoryPrediction:
        return predict(REFERENCE, 300, short, VariantParams(micro_batch_size=1, **techniques, **more), "cuda")

    parameters = parameter_count(REFERENCE, 300)
    assert peak().peak_bytes / parameters == pytest.approx(16, rel=0.01)
    assert peak(optimizer_in_backward=True).peak_bytes / parameters == pytest.approx(12, rel=0.02)


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
    precision=st.sampled_from(["fp32", "tf32", "amp_bf16", "amp_fp16", "bf16", "fp8"]),
    recompute=st.sampled_from(
        ["none", "every_block", "selective", "offload", {"every_n_blocks": 5}, {"budget": 0.3}]
    ),
    optimizer=st.sampled_from(["adamw", "adamw_8bit", "muon"]),
    optimizer_in_backward=st.booleans(),
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
    # The leanest: weights in bf16, both moments in 8 bits, gradients never all alive.
    assert prediction.peak_bytes >= 4 * parameter_count(REFERENCE, 5000)
    assert peak(variant, vocab_size=6000).peak_bytes > prediction.peak_bytes
    assert peak(variant, where="auto").peak_bytes >= peak(variant, where="cuda").peak_bytes
    if variant.micro_batch_size < 32:
        larger = variant.model_copy(update={"micro_batch_size": 2 * variant.micro_batch_size})
        assert peak(larger).peak_bytes >= prediction.peak_bytes
    if variant.recompute != "offload":
        everything = variant.model_copy(update={"recompute": "every_block"})
        assert peak(everything).peak_bytes <= prediction.peak_bytes
