"""What a variant may leave to the plan, and what it must say for that."""

import warnings
from typing import Any

import pytest
from pydantic import ValidationError

from stages.params import Params, ParamsError, VariantParams, VariantToPlan, check_params
from tests.training.small_run import small_params


def read(variant: dict[str, Any], hardware: dict[str, Any], **training: Any) -> Params:
    raw = small_params(**training).model_dump()
    return check_params(raw | {"hardware": hardware, "variants": {"v": variant}})


def problems(variant: dict[str, Any], hardware: dict[str, Any], **training: Any) -> list[str]:
    with pytest.raises(ParamsError) as error:
        read(variant, hardware, **training)
    return error.value.problems


GPU = {"target": "rtx_4090"}


def test_a_variant_is_whole_unless_it_says_auto() -> None:
    assert type(read({"micro_batch_size": 8}, GPU).variants["v"]) is VariantParams
    for left in ({"micro_batch_size": "auto"}, {"fit": "auto"}, {"fit": "auto", "micro_batch_size": 4}):
        assert type(read(left, GPU).variants["v"]) is VariantToPlan


def test_what_is_written_is_kept_and_nothing_else() -> None:
    variant = read({"fit": "auto", "micro_batch_size": "auto", "loss": "full", "precision": "bf16"}, GPU)
    left = variant.variants["v"]
    assert isinstance(left, VariantToPlan)
    assert left.given == {"loss": "full", "precision": "bf16"}
    whole = left.resolved(micro_batch_size=2, recompute="selective")
    assert type(whole) is VariantParams
    assert (whole.micro_batch_size, whole.loss, whole.recompute) == (2, "full", "selective")
    with pytest.raises(ValidationError):
        left.resolved(recompute="some", micro_batch_size=2)


def test_survives_a_round_trip_without_warnings() -> None:
    """A default that was not written must not come back as if it were."""
    params = read({"fit": "auto", "recompute": {"every_n_blocks": 2}}, GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = check_params(params.model_dump())
        text = params.model_dump_json()
    assert again == params
    left = again.variants["v"]
    assert isinstance(left, VariantToPlan)
    assert set(left.given) == {"recompute"}
    assert '"variants":{"v":{"recompute":{"every_n_blocks":2},"fit":"auto"}}' in text


@pytest.mark.parametrize("hardware", [{}, {"device": "cuda"}, {"device": "cpu", "target": "cpu"}])
@pytest.mark.parametrize("key", ["fit", "micro_batch_size"])
def test_auto_needs_a_memory(key: str, hardware: dict[str, Any]) -> None:
    (found,) = problems({key: "auto"}, hardware)
    assert found.startswith(f"variants.v.{key}: auto needs a memory to fit into and hardware.target ")
    assert found.endswith("such as rtx_4090 or a100_80gb, or set hardware.memory_gib")
    read({key: "auto"}, {"device": "cpu"} | hardware | {"memory_gib": 8})


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"fit": "yes"}, "variants.v.fit: input should be 'auto', found 'yes'"),
        ({"fit": "auto", "micro_batch_size": 3}, "variants.v.micro_batch_size: 3 does not divide"),
        ({"fit": "auto", "precison": "fp32"}, "variants.v.precison: unknown key; did you mean precision?"),
        ({"fit": "auto", "optimizer_in_backward": True}, "variants.v.optimizer_in_backward: clipping by"),
    ],
)
def test_the_other_rules_hold(variant: dict[str, Any], message: str) -> None:
    found = [problem for problem in problems(variant, GPU) if problem.startswith(message)]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ({"target": "rtx4090"}, "hardware.target: input should be 'cpu', 'rtx_3060_12gb',"),
        (
            {"target": "h200", "device": "cpu"},
            "hardware.target: h200 is a GPU and hardware.device is cpu; set device: cuda, or target: cpu",
        ),
        (
            {"target": "cpu", "device": "auto"},
            "hardware.target: cpu is planned for and hardware.device is auto; set device: cpu too",
        ),
        ({"memory_gib": 12}, "hardware.memory_gib: 12 names no device and hardware.device is auto; what a"),
        (
            {"device": "cuda", "memory_gib": 1, "memory_reserve_gib": 2},
            "hardware.memory_reserve_gib: 2 leaves nothing of",
        ),
        ({"device": "cuda", "memory_gib": 0}, "hardware.memory_gib: input should be greater than 0, found 0"),
        ({"price_per_hour": -1}, "hardware.price_per_hour: input should be greater than 0, found -1"),
    ],
)
def test_targets_that_are_refused(hardware: dict[str, Any], message: str) -> None:
    (found,) = problems({"micro_batch_size": 8}, hardware)
    assert found.startswith(message)
