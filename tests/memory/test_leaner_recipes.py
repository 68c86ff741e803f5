"""What is advised when memory runs out: allowed by the params, and predicted to need less."""

from typing import Any

import pytest

from stages.memory.leaner_recipes import leaner_recipes, next_smaller_micro_batch, predicted_peak_bytes
from stages.params import TokenizerParams, VariantParams
from tests.training.small_run import small_params


def changes(variant: dict[str, Any], **training: Any) -> dict[str, int]:
    params = small_params(variant, **training)
    return {recipe.change: recipe.peak_bytes for recipe in leaner_recipes(params, "v", "cpu")}


def test_a_plain_recipe_can_change_in_every_way() -> None:
    found = changes({"micro_batch_size": 8}, sequence_length=64)
    assert list(found)[:3] == ["micro_batch_size: 4", "micro_batch_size: 2", "micro_batch_size: 1"]
    assert "recompute: every_block" in found
    params = small_params({"micro_batch_size": 8}, sequence_length=64)
    now = predicted_peak_bytes(params, params.variants["v"], "cpu")
    assert all(peak < now for peak in found.values())
    assert found["micro_batch_size: 1"] < found["micro_batch_size: 4"]


def test_fewer_logits_help_where_they_are_the_peak() -> None:
    params = small_params({"micro_batch_size": 8, "loss_chunk_tokens": 64}, sequence_length=64)
    params = params.model_copy(update={"tokenizer": TokenizerParams(vocab_size=8192)})
    found = {recipe.change: recipe.peak_bytes for recipe in leaner_recipes(params, "v", "cpu")}
    assert found["loss: chunked"] < predicted_peak_bytes(params, params.variants["v"], "cpu")


def test_what_the_rules_refuse_is_not_advised() -> None:
    """An optimizer in the backward pass cannot accumulate."""
    found = changes({"micro_batch_size": 8, "optimizer_in_backward": True}, max_grad_norm=None)
    assert not [change for change in found if change.startswith("micro_batch_size")]


def test_what_is_on_already_is_not_advised() -> None:
    found = changes({"micro_batch_size": 1, "recompute": "every_block", "loss": "chunked"})
    assert not [change for change in found if not change.startswith("optimizer")]


@pytest.mark.parametrize(
    ("micro_batch_size", "global_batch_size", "smaller"), [(8, 8, 4), (6, 12, 3), (5, 15, 1), (1, 8, None)]
)
def test_the_next_smaller_micro_batch(
    micro_batch_size: int, global_batch_size: int, smaller: int | None
) -> None:
    recipe = VariantParams(micro_batch_size=micro_batch_size)
    assert next_smaller_micro_batch(recipe, global_batch_size) == smaller
