"""The recipes that a variant may become, and how they are called."""

from itertools import product
from typing import Any

from pydantic import ValidationError

from stages.params import Params, VariantParams, VariantToPlan
from stages.params.section import divisors

RECOMPUTES = ("none", "selective", "every_block")
LOSSES = ("full", "chunked")
"""What `fit: auto` searches, the mildest first."""
_ALONE: tuple[str, ...] = ("ddp",)
_SHARED: tuple[str, ...] = ("ddp", "fsdp")
_LAST_RESORT: tuple[str, ...] = ("fsdp_cpu_offload",)
"""Parallelisms that it searches: with one rank, with more, and where nothing else fits."""


def candidates_of(
    params: Params, written: VariantParams, last_resort: bool = False
) -> list[list[VariantParams]]:
    """The recipes that a variant may become, those that differ in the micro-batch alone together, ascending.

    Of a variant that is whole: itself with every micro-batch.

    Args:
        last_resort: those that keep their weights in host memory, where the variant does not say otherwise.
    """
    searches = isinstance(written, VariantToPlan) and written.fit is not None
    given = (
        written.given
        if isinstance(written, VariantToPlan)
        else written.model_dump(exclude={"micro_batch_size"})
    )
    sizes = [given["micro_batch_size"]] if "micro_batch_size" in given else None
    techniques: list[dict[str, Any]] = [{}]
    if searches:
        recomputes = [given["recompute"]] if "recompute" in given else RECOMPUTES
        losses = [given["loss"]] if "loss" in given else LOSSES
        parallelisms = _SHARED if params.training.ranks > 1 else _ALONE
        if last_resort:
            parallelisms = _LAST_RESORT
        if "parallelism" in given:
            parallelisms = () if last_resort else (given["parallelism"],)
        techniques = [
            {"parallelism": parallelism, "recompute": r, "loss": loss}
            for parallelism, r, loss in product(parallelisms, recomputes, losses)
        ]
    groups = []
    for choice in techniques:
        sized = sizes or divisors(params.training.global_batch_size // params.training.ranks)
        group = [
            recipe for size in sized if (recipe := allowed_recipe(params, given | choice, size)) is not None
        ]
        if group:
            groups.append(group)
    return groups


def allowed_recipe(params: Params, keys: dict[str, Any], micro_batch_size: int) -> VariantParams | None:
    """The recipe of these keys; None where a rule forbids it."""
    try:
        recipe = VariantParams(**keys | {"micro_batch_size": micro_batch_size})
    except ValidationError:
        return None
    broken = [*recipe.problems(), *recipe.conflicts(params.training, params.hardware)]
    return None if broken else recipe


def recipe_words(recipe: VariantParams) -> str:
    """`amp_bf16, recompute selective, loss chunked`: what is not the default, shortly."""
    words: list[str] = [recipe.precision]
    plain = VariantParams(micro_batch_size=1)
    for key in ("parallelism", "recompute", "loss", "compile", "optimizer"):
        value = getattr(recipe, key)
        if value != getattr(plain, key):
            named = (
                value
                if isinstance(value, str)
                else " ".join(f"{k} {v:g}" for k, v in value.model_dump().items())
            )
            words.append(named if key == "parallelism" else f"{key} {named}")
    if recipe.optimizer_in_backward:
        words.append("optimizer in backward")
    return ", ".join(words)
