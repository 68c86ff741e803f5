"""Trainings that diverge, as a whole stage: where they stop, what they keep, what they say."""

import json
import re
from typing import Any

import pytest

from tests.faults.stage_process import checkpoints, train
from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow


def diverge(repository: Repository, **training: Any) -> None:
    """A warm-up through all magnitudes: the gradients leave fp32's range after a good checkpoint."""

    def edit(params: dict[str, Any]) -> None:
        params["training"] |= {"learning_rate": 1e3, "warmup_steps": 500} | training

    repository.edit_params(edit)


def test_divergence_stops_before_the_weights_and_names_the_place(repository: Repository) -> None:
    diverge(repository)
    first = train(repository, "baseline")
    assert first.status == 1
    (line,) = first.errors()
    told = re.fullmatch(
        r"train baseline: step (\d+): (?:the loss is nan|the loss is inf|a gradient is no number) in "
        r"micro-batch 1 of 1, sequences \d+, \d+, \d+, \d+ of the train split; the weights are those of step "
        r"(\d+)\. Lower training\.learning_rate, or leave such batches out with training\.max_bad_steps",
        line,
    )
    assert told, first
    bad_step = int(told[1])
    assert int(told[2]) == bad_step - 1
    kept = checkpoints(repository.root, "baseline")
    assert kept and all(int(name.removeprefix("step-")) < bad_step for name in kept)
    assert not (repository.root / "models/baseline").exists()

    again = train(repository, "baseline")
    assert again.status == 1 and again.errors() == [line], again
    assert "going on after step" in again.stdout


def test_bad_steps_that_may_be_left_out_are_counted_in_the_result(repository: Repository) -> None:
    diverge(repository, max_bad_steps=1000, token_budget=32 * 4 * 520)
    ended = train(repository, "baseline")
    assert ended.status == 0, ended
    training = json.loads((repository.root / "models/baseline/training.json").read_text())
    assert 0 < training["skipped_steps"] < training["steps"] == 520


def test_fp16_that_overflows_for_ever_stops(repository: Repository) -> None:
    def edit(params: dict[str, Any]) -> None:
        params["training"] |= {"learning_rate": 1e8, "max_overflows_in_a_row": 5}
        params["variants"]["baseline"]["precision"] = "amp_fp16"

    repository.edit_params(edit)
    ended = train(repository, "baseline")
    assert ended.status == 1
    (line,) = ended.errors()
    assert re.fullmatch(
        r"train baseline: the gradients overflowed in 5 steps in a row up to step \d+ and the scale is down "
        r"to \S+; lower training\.learning_rate or use precision amp_bf16, which has fp32's range",
        line,
    ), ended
    assert not (repository.root / "models/baseline").exists()
