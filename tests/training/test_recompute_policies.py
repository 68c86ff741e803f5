"""Selective recompute, the memory budget and what each policy keeps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from stages.measure.peak_memory import live_cpu_blocks, measure_peak
from stages.model.llama import Llama
from stages.model.loss import chunked_loss, full_loss
from stages.params import VariantParams
from stages.training import recompute
from stages.training.compilation import apply_compile
from stages.training.recompute import apply_recompute
from tests.model.small_llama import small_llama, small_params, tokens
from tests.training.small_run import bit_equal, distance

CPU = torch.device("cpu")
IDS = tokens(4, 16)
DOCUMENTS = torch.tensor([0, 5, 16, 32, 40, 48, 64], dtype=torch.int32)

Gradients = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def full_budget_again() -> Iterator[None]:
    yield
    functorch_config.activation_memory_budget = 1.0  # type: ignore[attr-defined]


def variant(policy: Any, compile: str = "off") -> VariantParams:
    return VariantParams(micro_batch_size=4, recompute=policy, compile=compile)  # type: ignore[arg-type]


def backward(
    model: Llama, *, cu_seqlens: torch.Tensor | None = None, autocast: bool = False, chunked: bool = False
) -> None:
    """One micro-batch, as the train step does it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model(IDS, cu_seqlens)
        weight = model.lm_head.weight
        loss = (
            chunked_loss(hidden, weight, IDS, chunk_tokens=16) if chunked else full_loss(hidden, weight, IDS)
        )
    (loss / IDS.numel()).backward()


def gradients(policy: Any, *, tied: bool = False, micro_batches: int = 2, **options: Any) -> Gradients:
    model = small_llama(small_params(tie_word_embeddings=tied))
    apply_recompute(model, variant(policy))
    for _ in range(micro_batches):
        backward(model, **options)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "full"])
def test_selective_gradients_are_bit_equal(packed: bool, chunked: bool) -> None:
    options: dict[str, Any] = {"cu_seqlens": DOCUMENTS if packed else None, "chunked": chunked}
    assert bit_equal(gradients("selective", **options), gradients("none", **options))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_selective_under_autocast_with_a_tied_head_over_micro_batches(packed: bool) -> None:
    """pytorch#193338: a weight that autocast cast in one region and finds in its cache in another."""
    options: dict[str, Any] = {
        "cu_seqlens": DOCUMENTS if packed else None,
        "autocast": True,
        "tied": True,
        "micro_batches": 3,
    }
    assert bit_equal(gradients("selective", **options), gradients("none", **options))


def test_selective_refuses_nothing_in_evaluation() -> None:
    model = small_llama(small_params())
    expected = model(IDS, DOCUMENTS).detach()
    apply_recompute(model, variant("selective"))
    with torch.no_grad():
        assert torch.equal(model(IDS, DOCUMENTS), expected)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_selective_multiplies_no_matrix_twice(packed: bool) -> None:
    def flops(policy: Any) -> int:
        counter = FlopCounterMode(display=False)
        with counter:
            gradients(policy, cu_seqlens=DOCUMENTS if packed else None)
        return counter.get_total_flops()

    assert flops("selective") == flops("none") < flops("every_block")


def test_selective_calls_attention_as_often_as_none_does() -> None:
    """The operator of our own has no FLOP formula, so its calls are counted."""
    calls = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += func is torch.ops.frugal.document_attention.default
            return func(*args, **(kwargs or {}))

    counts = {}
    for policy in ("none", "selective", "every_block"):
        calls = 0
        with Count():
            gradients(policy, cu_seqlens=DOCUMENTS, micro_batches=1)
        counts[policy] = calls
    assert counts == {"none": 2, "selective": 2, "every_block": 4}


def wide_model() -> Llama:
    """Activations outweigh parameters: 512 tokens, 4 blocks."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    return small_llama(small_params(**shape, max_position_embeddings=128))


def peak_bytes(policy: Any, compile: str = "off", autocast: bool = False) -> int:
    """What a step takes on top of what is alive before it; other tests may have left something."""
    torch._dynamo.reset()  # or what was compiled under another budget would be found again
    model, ids = wide_model(), tokens(4, 128)
    apply_recompute(model, variant(policy, compile))
    apply_compile(model, variant(policy, compile))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = chunked_loss(model(ids), model.lm_head.weight, ids, chunk_tokens=16)
        loss.backward()

    step()  # compiles; gradients exist from here on
    alive = sum(live_cpu_blocks().values())
    return measure_peak(CPU, step).bytes - alive


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "amp_bf16"])
def test_selective_holds_less_than_none_and_more_than_every_block(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    none, selective, blocks = (peak_bytes(p, autocast=autocast) for p in ("none", "selective", "every_block"))
    assert blocks < 0.8 * selective < 0.8 * none
    # What autograd keeps of the plain formulas; those of elementwise.py keep part of what selective saves.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert selective < 0.8 * peak_bytes("none", autocast=autocast)


def test_budget_saves_less_the_smaller_it_is(without_code_generation: None) -> None:
    peaks = [peak_bytes({"budget": budget}, "blocks") for budget in (1.0, 0.5, 0.0)]
    assert peaks[0] > 1.1 * peaks[1] > 1.1 * peaks[2], peaks


@pytest.mark.slow
def test_budget_saves_less_in_compiled_code_too() -> None:
    peaks = [peak_bytes({"budget": budget}, "blocks") for budget in (1.0, 0.0)]
    assert peaks[0] > 1.3 * peaks[1], peaks


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_budget_keeps_gradients(
    budget: float, without_code_generation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = variant({"budget": budget}, "blocks")
    model = small_llama(small_params())
    assert apply_recompute(model, policy) == 2
    apply_compile(model, policy)
    backward(model, cu_seqlens=DOCUMENTS)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # Of the formulas that a compiler is given: gradients written by hand round otherwise.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    expected = gradients("none", cu_seqlens=DOCUMENTS, micro_batches=1)
    assert distance(found, expected) < 1e-6


def test_another_policy_takes_the_budget_back() -> None:
    apply_recompute(small_llama(small_params()), variant({"budget": 0.25}, "blocks"))
    assert functorch_config.activation_memory_budget == 0.25  # type: ignore[attr-defined]
    apply_recompute(small_llama(small_params()), variant("none"))
    assert functorch_config.activation_memory_budget == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("op", "kept"),
    [
        (torch.ops.aten.mm.default, True),
        (torch.ops.aten._scaled_mm.default, True),
        (torch.ops.aten._efficient_attention_forward.default, True),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, True),
        (torch.ops.frugal.document_attention.default, True),
        (torch.ops.aten.mul.Tensor, False),
        (torch.ops.aten._to_copy.default, False),
    ],
    ids=str,
)
def test_what_selective_keeps(op: Any, kept: bool) -> None:
    expected = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
    assert recompute._policy(None, op) is expected


def test_every_name_selective_keeps_is_an_operator_of_this_torch() -> None:
    """A name that torch changed would be kept never, and nobody would notice."""
    from torch.nn.attention import varlen  # noqa: F401  # defines its operator

    missing = set()
    for name in recompute._KEPT:
        namespace, _, operator = name.partition("::")
        if not hasattr(getattr(torch.ops, namespace), operator):
            missing.add(name)
    assert not missing
