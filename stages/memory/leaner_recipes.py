"""Changes to one variant that lower its peak memory, each with its prediction."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from stages.memory import predict
from stages.memory.candidates import candidates_of
from stages.memory.fit import Predictions, largest_micro_batch
from stages.params import Params, VariantParams

DeviceType = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True)
class LeanerRecipe:
    """One change of a variant, all else as it was."""

    change: str
    """As a line of params.yaml says it, such as `recompute: every_block`."""
    peak_bytes: int
    """Predicted."""


def predicted_peak_bytes(params: Params, recipe: VariantParams, device_type: DeviceType) -> int:
    """Of one optimizer step of this recipe."""
    return predict(params.model, params.tokenizer.vocab_size, params.training, recipe, device_type).peak_bytes


def leaner_recipes(params: Params, variant: str, device_type: DeviceType) -> list[LeanerRecipe]:
    """What the params allow and what is predicted to need less, the mildest change first.

    The smaller micro-batches leave the global batch as it is, so they change no loss.
    """
    recipe = params.variants[variant]
    now = predicted_peak_bytes(params, recipe, device_type)
    found = []
    for change, changed in _changes(recipe, params):
        peak = predicted_peak_bytes(params, changed, device_type)
        if peak < now:
            found.append(LeanerRecipe(change, peak))
    return found


def change_that_fits(predictions: Predictions, recipe: VariantParams) -> str | None:
    """The mildest change with which a recipe fits, as lines of params.yaml say it; None where none is known.

    A smaller micro-batch changes no loss, so it is tried first; then the other techniques that do not.
    """
    params = predictions.params
    changes: list[dict[str, Any]] = [{}, {"loss": "chunked"}, {"recompute": "every_block"}, _LEANEST]
    if recipe.parallelism == "ddp" and params.training.ranks > 1:
        changes += [{"parallelism": "fsdp"}, {"parallelism": "fsdp"} | _LEANEST]
    if recipe.parallelism != "fsdp_cpu_offload" and predictions.machine.device == "cuda":
        changes.append({"parallelism": "fsdp_cpu_offload"} | _LEANEST)
    for change in changes:
        changed = recipe.model_copy(update=change)
        if change and changed == recipe:
            continue
        groups = candidates_of(params, changed)
        found = largest_micro_batch(predictions, groups[0]).recipe if groups else None
        if found is not None:
            lines = {"micro_batch_size": found.micro_batch_size} | change
            return ", ".join(f"{key}: {value}" for key, value in lines.items())
    return None


_LEANEST = {"loss": "chunked", "recompute": "every_block"}


def next_smaller_micro_batch(recipe: VariantParams, global_batch_size: int) -> int | None:
    """The largest divisor of at most half this micro-batch; None at 1.

    Args:
        global_batch_size: what one rank has of it.
    """
    smaller = [n for n in range(1, recipe.micro_batch_size // 2 + 1) if global_batch_size % n == 0]
    return smaller[-1] if smaller else None


def _changes(recipe: VariantParams, params: Params) -> Iterator[tuple[str, VariantParams]]:
    smaller: int | None = recipe.micro_batch_size
    ranks = params.training.ranks
    global_batch_size = params.training.global_batch_size // ranks
    updates: list[dict[str, object]] = []
    while smaller := next_smaller_micro_batch(
        recipe.model_copy(update={"micro_batch_size": smaller}), global_batch_size
    ):
        updates.append({"micro_batch_size": smaller})
    if recipe.loss == "full":
        updates.append({"loss": "chunked"})
    if recipe.recompute == "none":
        updates += [{"recompute": "selective"}, {"recompute": "every_block"}]
    if recipe.optimizer == "adamw":
        updates.append({"optimizer": "adamw_8bit"})
    if recipe.parallelism == "ddp" and ranks > 1:
        updates.append({"parallelism": "fsdp"})
    for update in updates:
        try:
            changed = VariantParams(**recipe.model_dump() | update)
        except ValidationError:
            continue
        broken = [*changed.problems(), *changed.conflicts(params.training, params.hardware)]
        if not broken:
            (key, value), *_ = update.items()
            yield f"{key}: {value}", changed
