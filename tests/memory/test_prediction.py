"""The prediction against real measured steps, against known figures, and against its own rules."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._functorch import config as functorch_config

from benchmarks import plan_accuracy
from benchmarks.plan_accuracy import LEAN, VARIANT, Configuration, measured_peak, predicted
from stages.measure import parameter_count
from stages.memory import MemoryPrediction, predict
from stages.memory.make_up import OFFLOADED
from stages.memory.prediction import CUBLAS
from stages.model.llama import Llama
from stages.params import ModelParams, TrainingParams, VariantParams
from stages.training import low_precision_adamw
from stages.training.offload import BlockOffload
from tests.reference_model import REFERENCE

CPU = torch.device("cpu")
GIB = 2**30

SMALL = REFERENCE.model_copy(update={"num_hidden_layers": 3})


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine threads wait for each other longer than these sizes take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def onednn_off() -> Iterator[None]:
    """It packs what it multiplies; how much of it at a time depends on the processor and is not predicted.

    Seen: 1.3 MiB in fp32 and 2.7 MiB in bf16 at the most, whatever the size of the product.
    """
    with plan_accuracy.without_onednn():
        yield


def reference(
    model: ModelParams = REFERENCE, global_batch_size: int | None = None, **techniques: Any
) -> MemoryPrediction:
    recipe = VariantParams(**({"micro_batch_size": 8} | techniques))
    training = TrainingParams(
        sequence_length=512,
        global_batch_size=global_batch_size or recipe.micro_batch_size,
        token_budget=10**9,
        learning_rate=1e-3,
        sequences="packed",
    )
    return predict(model, 50_000, training, recipe, "cuda")


# The whole table is benchmarks/plan_accuracy.py. Here is one of each kind of step.
@pytest.mark.parametrize(
    "configuration",
    [
        Configuration("small", {}),
        Configuration("small", {"precision": "amp_bf16", "recompute": {"every_n_blocks": 2}, **LEAN}),
        Configuration("small", {"recompute": "selective", "micro_batch_size": 2}),
        Configuration("small", {"precision": "bf16", **LEAN}),
        Configuration("deep", {"precision": "amp_bf16", **LEAN}, 300, 256),
        Configuration("small", {"precision": "amp_bf16", "optimizer": "adamw_8bit", **LEAN}),
        Configuration("small", {"optimizer": "muon"}, sequences="padded", tied=True),
        Configuration("small", {"precision": "amp_bf16", **LEAN}, tied=True),
        Configuration("small", {"optimizer_in_backward": True}, 300, 256),
        Configuration("tiny", {"precision": "amp_fp16", "micro_batch_size": 1}, 300, 16),
    ],
    ids=str,
)
def test_prediction_is_the_measured_peak(
    configuration: Configuration, one_thread: None, onednn_off: None
) -> None:
    params = configuration.params
    assert predicted(params).peak_bytes == measured_peak(params, CPU), "byte for byte"


def test_documents_within_rows_change_nothing_that_is_kept(
    one_thread: None, onednn_off: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_rows = plan_accuracy._batch

    def cut_rows(*arguments: Any) -> Any:
        batch = whole_rows(*arguments)
        # Memory of NumPy's, as that of a real batch.
        starts = torch.from_numpy(np.arange(0, batch.input_tokens + 1, 16, dtype=np.int32))
        return plan_accuracy.MicroBatch(
            batch.input_ids_BS, batch.targets_BS, starts, batch.target_tokens, batch.input_tokens
        )

    monkeypatch.setattr(plan_accuracy, "_batch", cut_rows)
    params = Configuration("small", {}).params
    assert predicted(params).peak_bytes == measured_peak(params, CPU)


@pytest.mark.parametrize(
    "techniques",
    [
        {"precision": "amp_bf16", "loss": "chunked"},
        {"recompute": "selective", "micro_batch_size": 2},
        {"recompute": {"budget": 0.5}, "precision": "bf16"},
    ],
    ids=str,
)
def test_a_compiled_variant_needs_less_than_the_eager_one(techniques: dict[str, Any]) -> None:
    compiled = predicted(Configuration("small", {"compile": "blocks"} | techniques, 300, 256).params)
    recompute = techniques.get("recompute", "none")
    eager = techniques | {"recompute": "none" if recompute == {"budget": 0.5} else recompute}
    plain = predicted(Configuration("small", eager, 300, 256).params)
    assert (plain.accuracy, compiled.accuracy) == ("exact", "estimate")
    assert compiled.peak_bytes < plain.peak_bytes


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "techniques",
    [{"recompute": "every_block", "loss": "chunked"}, {"precision": "amp_bf16", "loss": "chunked"}],
    ids=str,
)
def test_a_compiled_variant_is_within_a_tenth_of_the_measured_peak(
    techniques: dict[str, Any], one_thread: None
) -> None:
    params = Configuration("small", {"compile": "blocks"} | techniques, 300, 256).params
    assert predicted(params).peak_bytes == pytest.approx(measured_peak(params, CPU), rel=0.1)


# A prototype of the same idea, on a model whose projections were not fused and with losses of another making:
# GiB at micro-batch 8 and 64. Ours must come out alike, or a little leaner.
@pytest.mark.parametrize(
    ("micro_batch_size", "techniques", "expected_gib"),
    [
        (8, {}, 7.7),
        (64, {}, 47.5),
        (8, {"precision": "amp_bf16"}, 6.5),
        (64, {"precision": "amp_bf16"}, 36.2),
        (8, {"precision": "amp_bf16", "recompute": "every_block"}, 4.5),
        (64, {"precision": "amp_bf16", "recompute": "every_block"}, 21.7),
        (8, {"precision": "amp_bf16", "loss": "chunked"}, 4.4),
        (64, {"precision": "amp_bf16", "loss": "chunked"}, 18.3),
        (8, {"precision": "amp_bf16", "recompute": "every_block", "loss": "chunked"}, 2.74),
        (64, {"precision": "amp_bf16", "recompute": "every_block", "loss": "chunked"}, 4.96),
    ],
)
def test_reference_model(micro_batch_size: int, techniques: dict[str, Any], expected_gib: float) -> None:
    peak = reference(micro_batch_size=micro_batch_size, **techniques)
    computed_bytes = 2 if "precision" in techniques else 4
    if "recompute" not in techniques:
        # The prototype kept silu(gate) of all 12 blocks: here backward computes it again.
        expected_gib -= 12 * micro_batch_size * 512 * 3_072 * computed_bytes / GIB
    if techniques.get("loss") != "chunked":
        assert peak.moment == "head and loss, forward"
        numbers, head = micro_batch_size * 512 * 50_000, 50_000 * 768
        # The prototype's peak was in the backward pass of the loss: fp32 logits, their log-softmax and its
        # gradient. Here the logits stand once and the head has its gradient already.
        logits = numbers * computed_bytes
        expected_gib += (logits + 4 * head - 3 * 4 * numbers) / GIB
        # Under autocast a 16-bit copy of the head.
        assert logits < peak.logits_and_loss < logits * 1.05 + 2 * head + 2**26
    assert 0.88 < peak.peak_bytes / GIB / expected_gib < 1.12


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("sequences", ["packed", "padded"])
def test_attention_on_cuda_never_builds_the_scores(precision: str, sequences: str) -> None:
    """Linear in the length: at 8 x 512 and at 1 x 4096 tokens, up to what is rounded."""
    peaks = []
    for rows, positions in ((8, 512), (1, 4096)):
        training = TrainingParams(
            sequence_length=positions,
            global_batch_size=rows,
            token_budget=10**9,
            learning_rate=1e-3,
            sequences=sequences,  # type: ignore[arg-type]
        )
        model = SMALL.model_copy(update={"max_position_embeddings": 4096})
        recipe = VariantParams(micro_batch_size=rows, precision=precision, loss="chunked")  # type: ignore[arg-type]
        peaks.append(predict(model, 300, training, recipe, "cuda").peak_bytes)
    scores = 4096 * 4096 * 12 * 2
    assert abs(peaks[1] - peaks[0]) < 0.02 * scores


EVERY_KIND: list[dict[str, Any]] = [
    {},
    {"precision": "tf32", "recompute": "selective"},
    {"precision": "amp_bf16", "recompute": "every_block", "loss": "chunked"},
    {"precision": "amp_fp16", "recompute": {"every_n_blocks": 2}},
    {"precision": "bf16", "optimizer": "adamw_8bit", "optimizer_in_backward": True, "loss": "chunked"},
    {"precision": "fp8", "recompute": "every_block", "optimizer": "muon"},
    {"recompute": "offload", "micro_batch_size": 2, "loss": "chunked"},
    {"recompute": {"budget": 0.5}, "compile": "blocks"},
]


@pytest.mark.parametrize("techniques", EVERY_KIND, ids=str)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_make_up_and_timeline_add_up(techniques: dict[str, Any], device: Any) -> None:
    variant = VariantParams(**({"micro_batch_size": 4} | techniques))
    training = TrainingParams(
        sequence_length=64, global_batch_size=4, token_budget=10**9, learning_rate=1e-3, max_grad_norm=None
    )
    peak = predict(SMALL, 1000, training, variant, device)
    parts = {
        name: getattr(peak, name)
        for name in (
            "parameters",
            "gradients",
            "optimizer_state",
            "activations",
            "logits_and_loss",
            "temporaries",
        )
    }
    assert all(size >= 0 for size in parts.values())
    assert sum(parts.values()) == peak.peak_bytes
    assert sum(peak.activations_by_kind.values()) == peak.activations
    weight_bytes = 2 if variant.precision == "bf16" else 4
    # A block of the CUDA allocator is a multiple of 512 bytes; a gain of this model is one already.
    assert peak.parameters == weight_bytes * parameter_count(SMALL, 1000)
    over_time = [sum(at) for at in zip(*peak.timeline.live_bytes.values(), strict=True)]
    assert max(over_time) == peak.peak_bytes
    at_peak = over_time.index(peak.peak_bytes)
    assert parts == {name: line[at_peak] for name, line in peak.timeline.live_bytes.items()}
    assert all(size >= 0 for line in peak.timeline.live_bytes.values() for size in line)
    assert list(peak.timeline.event) == sorted(set(peak.timeline.event))
    assert peak.moment in {name for _, name in peak.timeline.phases}
    assert (peak.allowances == {}) == (device == "cpu")
    assert peak.needed_bytes == peak.peak_bytes + sum(peak.allowances.values())


def test_bytes_of_the_optimizers_by_hand() -> None:
    D, F, V, kv, layers = 768, 3072, 50_000, 192, 3
    gains = D * (2 * layers + 1)
    block = D * (D + 2 * kv) + D * D + 3 * D * F
    numbers = layers * block + 2 * V * D + gains
    quantized = 2 * (numbers - gains) * (1 + 4 / 256) + 8 * gains
    for techniques, expected in (
        ({}, 8 * numbers),
        ({"precision": "bf16"}, 4 * numbers),
        ({"optimizer": "adamw_8bit"}, quantized),
        ({"optimizer": "muon"}, 4 * layers * block + 8 * (2 * V * D + gains)),
    ):
        scalars_and_tables = reference(SMALL, **techniques).optimizer_state - expected
        assert 0 < scalars_and_tables < 400_000, techniques


def test_accumulation_holds_gradients_while_the_next_micro_batch_runs() -> None:
    alone, accumulated = reference(SMALL), reference(SMALL, global_batch_size=64)
    head = 4 * 50_000 * SMALL.hidden_size
    assert alone.gradients == head, "the loss makes it before anything else has one"
    assert accumulated.gradients == accumulated.parameters + head
    token_ids = 2 * 8 * 56 * 512
    assert accumulated.peak_bytes - alone.peak_bytes - accumulated.parameters == pytest.approx(
        token_ids, rel=0.02
    )


def test_offload_keeps_two_blocks_whatever_the_depth() -> None:
    def peak(layers: int) -> MemoryPrediction:
        model = REFERENCE.model_copy(update={"num_hidden_layers": layers})
        return reference(model, recompute="offload", loss="chunked")

    shallow, deep = peak(4), peak(8)
    kept_per_layer = (deep.parameters - shallow.parameters) * 4  # weight, gradient and two moments
    assert deep.peak_bytes - shallow.peak_bytes < 1.01 * kept_per_layer
    assert deep.activations_by_kind[OFFLOADED] == shallow.activations_by_kind[OFFLOADED] > 0


def test_optimizer_in_backward_saves_the_gradients() -> None:
    def peak(**more: Any) -> MemoryPrediction:
        training = TrainingParams(
            sequence_length=2, global_batch_size=1, token_budget=10**9, learning_rate=1e-3, max_grad_norm=None
        )
        recipe = VariantParams(micro_batch_size=1, loss="chunked", loss_chunk_tokens=16, **more)
        return predict(REFERENCE, 300, training, recipe, "cuda")

    parameters = parameter_count(REFERENCE, 300)
    assert peak().peak_bytes / parameters == pytest.approx(16, rel=0.01)
    assert peak(optimizer_in_backward=True).peak_bytes / parameters == pytest.approx(12, rel=0.02)


def test_older_devices_take_the_kernel_without_groups() -> None:
    training = TrainingParams(sequence_length=64, global_batch_size=4, token_budget=10**9, learning_rate=1e-3)
    recipe = VariantParams(micro_batch_size=4, precision="amp_fp16")
    turing, ampere, hopper = (
        predict(SMALL, 300, training, recipe, "cuda", capability) for capability in ((7, 5), (8, 0), (9, 0))
    )
    assert turing.activations > ampere.activations == hopper.activations
    # The train stage sets one workspace for all (stages/training/determinism.py).
    for prediction in (turing, ampere, hopper):
        assert prediction.allowances[CUBLAS] == 2 * 8 * 4096 * 2**10


def test_tf32_is_fp32_and_fp16_is_bf16_in_size() -> None:
    assert reference(SMALL, precision="tf32").peak_bytes == reference(SMALL, precision="fp32").peak_bytes
    half = [reference(SMALL, precision=precision).peak_bytes for precision in ("amp_fp16", "amp_bf16")]
    assert half[0] == pytest.approx(half[1], rel=1e-5)  # the scaler's scalars


def test_nothing_of_a_prediction_stays_behind() -> None:
    """Neither in the engine's modules nor in the random state."""

    def facts() -> list[Any]:
        return [
            Llama.to,
            torch.UntypedStorage.data_ptr,
            torch.UntypedStorage.device,
            torch.get_rng_state,
            low_precision_adamw._PIECE_ELEMENTS,
            BlockOffload.apply,
            torch.get_rng_state().tolist(),
            functorch_config.activation_memory_budget,
        ]

    functorch_config.activation_memory_budget = 0.3  # as a variant with a budget sets it
    try:
        _check_facts(facts)
    finally:
        functorch_config.activation_memory_budget = 1.0


def _check_facts(facts: Callable[[], list[Any]]) -> None:
    before = facts()
    first = reference(SMALL, precision="bf16", optimizer="adamw_8bit", recompute="every_block")
    assert facts() == before
    assert first == reference(SMALL, precision="bf16", optimizer="adamw_8bit", recompute="every_block")


_PLAN_7B = """
import json, resource
from stages.memory import predict
from stages.params import ModelParams, TrainingParams, VariantParams

model = ModelParams(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    intermediate_size=14336, max_position_embeddings=2048,
)
training = TrainingParams(sequence_length=2048, global_batch_size=8, token_budget=10**9, learning_rate=1e-3)
peak = predict(model, 128_000, training, VariantParams(micro_batch_size=1), "cuda").peak_bytes
print(json.dumps([peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


@pytest.mark.slow
def test_a_7b_model_is_planned_in_the_memory_of_a_laptop() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PLAN_7B], capture_output=True, text=True, check=True, timeout=300
    )
    peak, resident = json.loads(ran.stdout)
    assert peak > 100 * GIB
    assert resident < 1.5 * GIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "techniques",
    [
        {},
        {"precision": "amp_bf16"},
        {"precision": "amp_bf16", "recompute": "every_block", "loss": "chunked"},
        {"precision": "amp_fp16", "recompute": "selective", "micro_batch_size": 4},
        {"precision": "bf16", "optimizer": "adamw_8bit", "loss": "chunked"},
        {"recompute": "offload", "loss": "chunked"},
        {"precision": "amp_bf16", "optimizer": "muon", "recompute": {"every_n_blocks": 2}},
    ],
    ids=str,
)
def test_prediction_on_cuda_against_max_memory_allocated(techniques: dict[str, Any]) -> None:
    shape = Configuration("wide", {"micro_batch_size": 8} | techniques, 16_000, 512, 8)
    params = shape.params
    wide = params.model.model_copy(update={"hidden_size": 1024, "intermediate_size": 2816})
    params = params.model_copy(update={"model": wide.model_copy(update={"num_attention_heads": 16})})
    prediction = predict(
        params.model,
        params.tokenizer.vocab_size,
        params.training,
        params.variants[VARIANT],
        "cuda",
        torch.cuda.get_device_capability(),
        torch.cuda.get_device_properties().multi_processor_count,
    )
    measured = measured_peak(params, torch.device("cuda"))
    assert prediction.allocated_bytes == pytest.approx(measured, rel=0.05)
