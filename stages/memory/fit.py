"""What of a variant fits the memory that is planned for, and which recipe of those that fit is the fastest.

A prediction traces a whole step, so few are asked for. The peak grows with the micro-batch, in stretches of
straight lines that only get steeper, so the line between one that fits and one that does not crosses the
capacity where the peak still fits: that is where to look next. The choice and the next larger micro-batch are
always predicted themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stages.measure.forecast import Forecast, forecast, no_forecast_reason
from stages.measure.targets import TARGETS
from stages.measure.units import readable_bytes
from stages.memory.candidates import allowed_recipe, candidates_of, recipe_words
from stages.memory.machine import Machine
from stages.memory.prediction import MemoryPrediction, predict
from stages.params import Params, VariantParams, VariantToPlan

SHARDING_MUST_GAIN = 1.1
"""By so much fsdp must be forecast faster than ddp to be chosen where both fit: what it costs the host is
forecast roughly."""

ESTIMATE_ERROR = 0.10
ESTIMATE_MARGIN = "error of the estimate for compiled blocks"
"""Compiled variants are estimated within this share of the peak (benchmarks/plan_accuracy.py), so they fit
only with it added."""

_RANKED_AS = TARGETS["a100_80gb"]
"""Whose balance of FLOPs and bandwidth ranks recipes where no GPU is named; speeds are not shown then."""


class FitError(RuntimeError):
    """Nothing that a variant may be fits; the message says what came nearest."""


class Predictions:
    """Predictions of one params file for one machine, each made once.

    Args:
        announce: is told of each one before it is made.
        made: what other machines were predicted to need; those with the same kernels share it.
    """

    def __init__(
        self,
        params: Params,
        machine: Machine,
        announce: Callable[[str], None] = lambda _: None,
        made: dict[object, MemoryPrediction] | None = None,
    ):
        self.params, self.machine = params, machine
        self._announce = announce
        self._made = {} if made is None else made

    def of(self, recipe: VariantParams) -> MemoryPrediction:
        key = (self.machine.kernels(self.params.model, recipe), recipe.model_dump_json())
        if key not in self._made:
            self._announce(f"{recipe_words(recipe)}, micro-batch {recipe.micro_batch_size}")
            self._made[key] = predict(
                self.params.model,
                self.params.tokenizer.vocab_size,
                self.params.training,
                recipe,
                self.machine.device,
                self.machine.compute_capability,
                self.machine.multiprocessors,
            )
        return self._made[key]

    def allowances(self, recipe: VariantParams) -> dict[str, int]:
        """What is needed beside the predicted peak, in bytes."""
        memory = self.of(recipe)
        if memory.accuracy == "exact":
            return memory.allowances
        return memory.allowances | {ESTIMATE_MARGIN: int(memory.peak_bytes * ESTIMATE_ERROR)}

    def needed_bytes(self, recipe: VariantParams) -> int:
        """What the device must have free: the peak and the allowances."""
        return self.of(recipe).peak_bytes + sum(self.allowances(recipe).values())

    def fits(self, recipe: VariantParams) -> bool:
        capacity = self.machine.capacity_bytes
        return capacity is None or self.needed_bytes(recipe) <= capacity


@dataclass(frozen=True)
class LargestMicroBatch:
    """The largest divisor of the global batch with which a recipe fits, and the one above it."""

    recipe: VariantParams | None
    """None: not even the smallest fits."""
    next_larger: VariantParams | None
    """Does not fit; None where the whole global batch does."""


def largest_micro_batch(predictions: Predictions, candidates: list[VariantParams]) -> LargestMicroBatch:
    """Search recipes that differ in their micro-batch alone, ascending; at least one.

    The whole global batch is asked first: without accumulation no gradients wait during the forward pass, so
    it may fit where a smaller one does not.
    """
    capacity = predictions.machine.capacity_bytes
    if capacity is None or predictions.fits(candidates[-1]):
        return LargestMicroBatch(candidates[-1], None)
    fitting, too_large = -1, len(candidates) - 1
    while too_large - fitting > 1:
        guess = 0 if fitting < 0 else _crossing(predictions, candidates, fitting, too_large, capacity)
        if predictions.fits(candidates[guess]):
            fitting = guess
        else:
            too_large = guess
    return LargestMicroBatch(candidates[fitting] if fitting >= 0 else None, candidates[too_large])


def _crossing(
    predictions: Predictions, candidates: list[VariantParams], low: int, high: int, capacity: int
) -> int:
    """The largest between two that a straight line lets fit; at least the next one."""
    size_low, size_high = (candidates[place].micro_batch_size for place in (low, high))
    need_low, need_high = (predictions.needed_bytes(candidates[place]) for place in (low, high))
    crossing = size_low + (size_high - size_low) * (capacity - need_low) / max(need_high - need_low, 1)
    below = [place for place in range(low + 1, high) if candidates[place].micro_batch_size <= crossing]
    return below[-1] if below else low + 1


@dataclass(frozen=True)
class Considered:
    """One recipe of a search and what became of it."""

    recipe: VariantParams
    needed_bytes: int | None
    """None: it was not predicted, since it could not have been the fastest."""
    forecast: Forecast | None
    verdict: str


@dataclass(frozen=True)
class Fit:
    """What a variant becomes."""

    recipe: VariantParams
    considered: tuple[Considered, ...]
    """In the order of the search; empty where there was nothing to choose."""


def fit_variant(predictions: Predictions, variant: str) -> Fit:
    """Choose what the variant leaves to the plan.

    Raises:
        FitError: nothing fits, or the rules between the params leave nothing to choose from.
    """
    written = predictions.params.variants[variant]
    if not isinstance(written, VariantToPlan):
        return Fit(written, ())
    groups = candidates_of(predictions.params, written)
    if not groups:
        raise FitError(
            f"variants.{variant}: the keys that it holds rule out every choice; give micro_batch_size and "
            "leave fit out to see which rule it breaks"
        )
    if predictions.machine.capacity_bytes is None:
        raise FitError(f"variants.{variant}: auto needs hardware.target or hardware.memory_gib")
    tried: list[tuple[VariantParams, str]] = []
    if predictions.params.training.ranks > 1:
        groups = _without_hopeless(predictions, groups, tried)
    fit = _fastest(predictions, groups, tried)
    if fit is None and predictions.machine.device == "cuda":
        groups = candidates_of(predictions.params, written, last_resort=True)
        fit = _fastest(predictions, _without_hopeless(predictions, groups, tried), tried)
    if fit is not None:
        return fit
    raise FitError(_nothing_fits(predictions, variant, [recipe for recipe, _ in tried]))


def _without_hopeless(
    predictions: Predictions, groups: list[list[VariantParams]], seen: list[tuple[VariantParams, str]]
) -> list[list[VariantParams]]:
    """Groups less those of a parallelism whose leanest group does not fit: trying each would take minutes.

    Args:
        seen: what was looked at before, and is added to.
    """
    hopeful: list[list[VariantParams]] = []
    for parallelism in dict.fromkeys(group[0].parallelism for group in groups):
        of_it = [group for group in groups if group[0].parallelism == parallelism]
        leanest = of_it[-1]
        if any(map(predictions.fits, (leanest[0], leanest[-1]))):
            hopeful += of_it
        else:
            seen.append((leanest[0], "does not fit"))
    return hopeful


def _fastest(
    predictions: Predictions, groups: list[list[VariantParams]], seen: list[tuple[VariantParams, str]]
) -> Fit | None:
    """The fastest recipe that fits; None where none does.

    Args:
        seen: what was looked at before, and is added to.

    A larger micro-batch is never forecast to be slower, so the whole global batch bounds each group: groups
    are searched by falling bound until the best that fits is at least as fast as every bound left.
    """
    ranked = sorted(groups, key=lambda group: -_rank(predictions, group[-1]))
    best: VariantParams | None = None
    for group in ranked:
        if best is not None and _rank(predictions, group[-1]) <= _rank(predictions, best):
            seen.append((group[-1], _SLOWER))
            continue
        found = largest_micro_batch(predictions, group)
        if found.next_larger is not None:
            seen.append((found.next_larger, "does not fit"))
        if found.recipe is not None:
            seen.append((found.recipe, "fits, and another is faster"))
            if best is None or _rank(predictions, found.recipe) > _rank(predictions, best):
                best = found.recipe
    if best is None:
        return None
    return Fit(
        best,
        tuple(
            Considered(
                recipe,
                None if verdict == _SLOWER else predictions.needed_bytes(recipe),
                forecast_of(predictions.params, recipe, predictions.machine),
                "chosen" if recipe == best else verdict,
            )
            for recipe, verdict in seen
        ),
    )


_SLOWER = "slower at any micro-batch"


def forecast_of(params: Params, recipe: VariantParams, machine: Machine) -> Forecast | None:
    """None where none can be made; `no_forecast_reason` says why."""
    if machine.target is None or no_forecast_reason(recipe, machine.target):
        return None
    price = params.hardware.price_per_hour
    vocab_size = params.tokenizer.vocab_size
    return forecast(params.model, vocab_size, params.training, recipe, machine.target, price)


def _rank(predictions: Predictions, recipe: VariantParams) -> float:
    """Forecast tokens per second, fsdp's less a margin; in words of another GPU where none is named."""
    params, target = predictions.params, predictions.machine.target
    for candidate in (target, _RANKED_AS):
        if candidate is not None and no_forecast_reason(recipe, candidate) is None:
            vocab_size = params.tokenizer.vocab_size
            speeds = forecast(params.model, vocab_size, params.training, recipe, candidate)
            return speeds.middle_tokens_per_second / (
                1.0 if recipe.parallelism == "ddp" else SHARDING_MUST_GAIN
            )
    return float(recipe.micro_batch_size)


def _nothing_fits(predictions: Predictions, variant: str, tried: list[VariantParams]) -> str:
    leanest = min(tried, key=predictions.needed_bytes)
    return (
        f"variants.{variant}: nothing fits {readable_bytes(predictions.machine.capacity_bytes or 0)} "
        f"({predictions.machine.label} less hardware.memory_reserve_gib); the leanest is "
        f"{recipe_words(leanest)} with micro_batch_size {leanest.micro_batch_size} and needs "
        f"{readable_bytes(predictions.needed_bytes(leanest))}; use a smaller model, "
        f"{_leaner_state(predictions.params, leanest)}, or a larger target"
    )


def _leaner_state(params: Params, leanest: VariantParams) -> str:
    """What makes weights, gradients and optimizer states smaller, as lines of params.yaml say it."""
    ranks = params.training.ranks
    alone = "optimizer: adamw_8bit, precision: bf16"
    if leanest.parallelism != "ddp":
        return f"more ranks (training.ranks is {ranks})"
    sharded = leanest.model_dump() | {"parallelism": "fsdp"}
    if ranks > 1 and allowed_recipe(params, sharded, leanest.micro_batch_size):
        return f"parallelism: fsdp, {alone}"
    return f"{alone}, parallelism: fsdp over several GPUs (training.ranks)" if ranks == 1 else alone
