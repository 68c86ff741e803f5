"""What the plan decided, read by the stages after it."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.params import Params, VariantParams, check_params
from stages.plan import main
from stages.planned import PlanError, check_device_memory, plan_digest, planned_memory_bytes, planned_params
from tests.training.small_run import small_params

GIB = 2**30


def params_with(variants: dict[str, Any], **training: Any) -> Params:
    raw = small_params(**training).model_dump(mode="json")
    hardware = {"device": "cpu", "memory_gib": 1, "memory_reserve_gib": 0}
    return check_params(raw | {"hardware": hardware, "variants": variants})


WHOLE = {"micro_batch_size": 2, "loss": "chunked"}
LEFT = {"micro_batch_size": "auto", "recompute": "selective"}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def planned(project: Path) -> Params:
    params = params_with({"whole": WHOLE, "left": LEFT, "fitted": {"fit": "auto"}})
    (project / "params.yaml").write_text(params.model_dump_json())
    for variant in ("left", "fitted"):
        assert main([variant]) == 0
    return params


def test_every_variant_is_whole(planned: Params) -> None:
    params = planned_params(planned)
    assert list(params.variants) == ["whole", "left", "fitted"]
    assert all(type(variant) is VariantParams for variant in params.variants.values())
    assert params.variants["whole"] is planned.variants["whole"]
    assert params.variants["left"].micro_batch_size == planned.training.global_batch_size
    assert params.variants["left"].recompute == "selective"
    assert params.accumulation_steps("fitted") == 1
    assert params.model == planned.model


def test_is_what_would_have_been_written_by_hand(planned: Params) -> None:
    chosen = planned_params(planned).variants["left"]
    by_hand = params_with({"left": chosen.model_dump()}).variants["left"]
    assert by_hand == chosen
    assert by_hand.model_dump(mode="json") == chosen.model_dump(mode="json")


def test_whole_variants_need_no_plan() -> None:
    params = params_with({"whole": WHOLE})
    assert planned_params(params) == params


def test_only_the_variants_asked_for(planned: Params) -> None:
    Path("results/plan/fitted.json").unlink()
    params = planned_params(planned, ["left"])
    assert type(params.variants["left"]) is VariantParams
    assert params.variants["fitted"] is planned.variants["fitted"]
    with pytest.raises(
        PlanError, match=r"^variants.fitted is planned for .* no results/plan/fitted.json; run"
    ):
        planned_params(planned)


@pytest.mark.parametrize("changes", [{"sequence_length": 24}, {"global_batch_size": 16}])
def test_a_plan_of_other_params_is_refused(planned: Params, changes: dict[str, int]) -> None:
    other = params_with({"left": LEFT}, **changes)
    with pytest.raises(
        PlanError, match=r"left.json was made from other params .*; run `dvc repro plan@left`"
    ):
        planned_params(other)


def test_a_plan_of_another_choice_is_refused(planned: Params) -> None:
    with pytest.raises(PlanError, match="other params"):
        planned_params(params_with({"left": LEFT | {"precision": "bf16"}}))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"params_digest": "0"}', "{digest}"])
def test_a_broken_plan_is_one_sentence(planned: Params, content: str) -> None:
    if content == "{digest}":
        content = json.dumps({"params_digest": plan_digest(planned, "left"), "techniques": {"loss": 3}})
    Path("results/plan/left.json").write_text(content)
    with pytest.raises(
        PlanError, match=r"left.json cannot be read as a plan \(.*\); run `dvc repro"
    ) as error:
        planned_params(planned)
    assert "\n" not in str(error.value)


def test_the_digest_follows_what_decides_and_nothing_else(planned: Params) -> None:
    one = plan_digest(planned, "left")
    assert json.loads(Path("results/plan/left.json").read_text())["params_digest"] == one
    assert plan_digest(planned.model_copy(update={"seed": 77}), "left") == one
    dearer = planned.hardware.model_copy(update={"price_per_hour": 3.0})
    assert plan_digest(planned.model_copy(update={"hardware": dearer}), "left") == one
    smaller = planned.hardware.model_copy(update={"memory_gib": 0.5})
    assert plan_digest(planned.model_copy(update={"hardware": smaller}), "left") != one
    assert plan_digest(planned, "fitted") != one


def test_needed_memory_where_a_memory_is_planned_for(planned: Params) -> None:
    needed = json.loads(Path("results/plan/left.json").read_text())["needed_memory_bytes"]
    assert planned_memory_bytes(planned, "left") == needed
    with pytest.raises(PlanError, match=r"no results/plan/whole.json"):
        planned_memory_bytes(planned, "whole")
    assert planned_memory_bytes(small_params(), "v") is None


def test_a_device_with_less_memory_is_refused() -> None:
    check_device_memory(8 * GIB, 8 * GIB)
    with pytest.raises(
        PlanError, match=r"^the plan needs 8.00 GiB and this device has 6.00 GiB; set hardware"
    ):
        check_device_memory(8 * GIB, 6 * GIB)
