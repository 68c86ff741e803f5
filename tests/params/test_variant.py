"""Every combination of techniques that is refused, and its neighbours that are not."""

from typing import Any

import pytest

from stages.params import BlockGroups, MemoryBudget, Params, ParamsError, check_params


def read(variant: dict[str, Any], device: str = "auto", **training: Any) -> Params:
    return check_params(
        {
            "seed": 1,
            "corpus": {"source": "embedded"},
            "tokenizer": {"vocab_size": 512},
            "model": {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 128,
                "max_position_embeddings": 128,
            },
            "training": {
                "sequence_length": 64,
                "global_batch_size": 8,
                "token_budget": 1_000_000,
                "learning_rate": 0.001,
            }
            | training,
            "hardware": {"device": device},
            "variants": {"v": {"micro_batch_size": 8} | variant},
        }
    )


def problems(variant: dict[str, Any], device: str = "auto", **training: Any) -> list[str]:
    with pytest.raises(ParamsError) as error:
        read(variant, device, **training)
    return error.value.problems


BUDGET = {"recompute": {"budget": 0.5}}
IN_BACKWARD = {"optimizer_in_backward": True}


def test_budget_needs_the_compiler() -> None:
    assert problems(BUDGET) == [
        "variants.v.recompute: {budget: …} is carried out by the compiler; set compile: blocks, or use "
        "selective"
    ]
    for compile in ("blocks", "model"):
        assert read(BUDGET | {"compile": compile}).variants["v"].recompute == MemoryBudget(budget=0.5)


@pytest.mark.parametrize("compile", ["blocks", "model"])
def test_offload_knows_no_compiled_graph(compile: str) -> None:
    offload = {"recompute": "offload"}
    assert problems(offload | {"compile": compile}) == [
        "variants.v.recompute: offload moves tensors as autograd saves them, and a compiled graph saves its "
        "own; set compile: off, or use {budget: …}"
    ]
    assert read(offload).variants["v"].recompute == "offload"


def test_pure_bf16_needs_an_optimizer_that_rounds_stochastically() -> None:
    assert problems({"precision": "bf16", "optimizer": "muon"}) == [
        "variants.v.optimizer: muon does not round bf16 weights stochastically, and small updates would "
        "vanish; use adamw or adamw_8bit with precision bf16, or muon with amp_bf16"
    ]
    for optimizer in ("adamw", "adamw_8bit"):
        params = read({"precision": "bf16", "optimizer": optimizer})
        assert params.variants["v"].optimizer == optimizer
    assert read({"precision": "amp_bf16", "optimizer": "muon"}).variants["v"].optimizer == "muon"


@pytest.mark.parametrize(
    ("variant", "training", "message"),
    [
        (
            {"precision": "amp_fp16"},
            {},
            "a GradScaler must see all gradients before any update; use amp_bf16 or fp32",
        ),
        ({"optimizer": "muon"}, {}, "works with adamw and adamw_8bit; muon has two optimizers"),
        (
            {"micro_batch_size": 2},
            {},
            "micro_batch_size 2 accumulates over 4 micro-batches, so gradients must be kept; use "
            "micro_batch_size 8",
        ),
        (
            {},
            {"max_grad_norm": 1.0},
            "clipping by training.max_grad_norm needs all gradients at one time; set it to null for every "
            "variant, or switch this off",
        ),
    ],
)
def test_optimizer_in_backward_sees_one_gradient_at_a_time(
    variant: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    unclipped = {"max_grad_norm": None} | training
    assert problems(IN_BACKWARD | variant, **unclipped) == [f"variants.v.optimizer_in_backward: {message}"]
    read(variant, **unclipped)
    read(IN_BACKWARD, max_grad_norm=None)
    read(IN_BACKWARD | {"optimizer": "adamw_8bit", "precision": "amp_bf16"}, max_grad_norm=None)


def test_clipping_is_the_default_and_so_refuses_it() -> None:
    assert [problem.split(":")[0] for problem in problems(IN_BACKWARD)] == [
        "variants.v.optimizer_in_backward"
    ]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (
            {"precision": "tf32"},
            "precision: tf32 is a mode of NVIDIA's tensor cores (compute capability 8.0 or newer) and "
            "hardware.device is cpu; use fp32 or amp_bf16",
        ),
        (
            {"precision": "fp8"},
            "precision: fp8 needs NVIDIA's 8-bit tensor cores (compute capability 8.9 or newer) and "
            "hardware.device is cpu; use fp32 or amp_bf16",
        ),
        (
            {"recompute": "offload"},
            "recompute: offload moves activations from the GPU to host memory and hardware.device is cpu; "
            "use every_block or selective",
        ),
    ],
)
def test_what_only_a_gpu_can_do(variant: dict[str, Any], message: str) -> None:
    assert problems(variant, device="cpu") == [f"variants.v.{message}"]
    read(variant, device="cuda")
    read(variant, device="auto")  # known when the device is; stages/training refuses it then


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16", "bf16"])
def test_a_cpu_can_do_the_rest(precision: str) -> None:
    assert read({"precision": precision}, device="cpu").variants["v"].precision == precision


def test_micro_batch_must_divide() -> None:
    assert problems({"micro_batch_size": 3}) == [
        "variants.v.micro_batch_size: 3 does not divide training.global_batch_size 8; use 1, 2, 4 or 8"
    ]


def test_all_refusals_of_a_variant_at_once() -> None:
    found = problems(
        BUDGET | IN_BACKWARD | {"precision": "bf16", "optimizer": "muon", "micro_batch_size": 2},
    )
    keys = [problem.split(":")[0].removeprefix("variants.v.") for problem in found]
    assert sorted(keys) == ["optimizer", *["optimizer_in_backward"] * 3, "recompute"]


def test_a_broken_section_does_not_hide_the_refusals_of_a_variant() -> None:
    found = problems(BUDGET, learning_rate=-1)
    assert [problem.split(":")[0] for problem in found] == ["training.learning_rate", "variants.v.recompute"]


def test_every_form_of_recompute_survives_a_round_trip() -> None:
    for recompute in ("none", "every_block", "selective", "offload", {"every_n_blocks": 3}):
        params = read({"recompute": recompute})
        assert check_params(params.model_dump()) == params
    params = read(BUDGET | {"compile": "blocks"})
    assert check_params(params.model_dump()) == params
    assert read({"recompute": {"every_n_blocks": 3}}).variants["v"].recompute == BlockGroups(every_n_blocks=3)
