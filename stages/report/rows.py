"""The comparison: one row per variant, each measured against the first."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from stages.params import BlockGroups, MemoryBudget, Params, VariantParams
from stages.report.bootstrap import PairedDifference, paired_bootstrap
from stages.report.inputs import Device, VariantFiles, VariantResults, read_variant


class ComparisonError(ValueError):
    """The variants did not do the same work, or their files are of other params."""


class Row(BaseModel):
    """One variant; the fields are the keys of compare.json, in its order."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    variant: str
    precision: str
    recompute: str
    """The policy's name; every_2_blocks and budget_0.5 carry their number."""
    compile: str
    micro_batch_size: int
    """Sequences in one forward and backward pass."""
    accumulation_steps: int
    """Micro-batches in one optimizer step."""
    tokens: int
    """Trained on; the same in every row."""
    validation_bits_per_byte: float
    delta_bits_per_byte: float
    """Against the first row; above zero is worse."""
    delta_ci95: tuple[float, float] | None
    """Paired bootstrap over validation documents; null where there is only one document."""
    tokens_per_second: float
    speedup: float | None
    """tokens_per_second / the first row's; null where the first row is of another device."""
    peak_memory_bytes: int
    peak_memory_kind: str
    memory_saved: float | None
    """1 - peak / the first row's peak, a fraction; null where that was measured on another device
    or in another way."""
    predicted_peak_memory_bytes: int
    """What peak_memory_bytes was predicted to be before training."""
    prediction_error: float | None
    """predicted / measured - 1; null where another kind of device was planned for, or another micro-batch."""
    mfu: float | None
    """Model FLOPs per second as a fraction of what the device can do."""
    compile_seconds: float | None
    skipped_steps: int
    """Steps that the GradScaler skipped."""
    device: str
    seed: int


@dataclass(frozen=True)
class Comparison:
    """The rows and what the figures and pages show beside them."""

    rows: tuple[Row, ...]
    results: Mapping[str, VariantResults]
    """By variant, in the order of the rows."""
    bootstrap_samples: int
    recipes: Mapping[str, VariantParams]
    """By variant: the techniques that have no column of their own in compare.json."""

    @property
    def reference(self) -> Row:
        return self.rows[0]

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that a row was measured on, in the order of the rows."""
        return tuple(dict.fromkeys(row.device for row in self.rows))


def build_comparison(params: Params, files: Mapping[str, VariantFiles]) -> Comparison:
    """Read every variant of `params.variants`, in order, and set it against the first.

    Raises:
        InputError: a file is missing or malformed.
        BootstrapError: variants were evaluated on different documents.
        ComparisonError: variants differ in tokens or seed, or a file is of other params.
    """
    results = {variant: read_variant(files[variant]) for variant in params.variants}
    for variant, result in results.items():
        _check_params(params, variant, result)
    _check_same_work(params, results)
    reference = next(iter(results.values()))
    rows = tuple(_row(params, variant, result, reference) for variant, result in results.items())
    return Comparison(rows, results, params.evaluation.bootstrap_samples, params.variants)


def device_name(device: Device) -> str:
    """A short name; of a CPU it says so, and with how many threads, which decide the speed."""
    name = re.sub(r"\((?:R|TM)\)|\bCPU\b|\bProcessor\b|@.*$", "", device.name, flags=re.IGNORECASE)
    name = " ".join(name.split())
    if device.kind == "cuda":
        return name or "CUDA GPU"
    threads = f"{device.threads} thread{'s' if device.threads > 1 else ''}" if device.threads else ""
    about = ", ".join(part for part in (name, threads) if part)
    return f"CPU ({about})" if about else "CPU"


def _row(params: Params, variant: str, result: VariantResults, reference: VariantResults) -> Row:
    recipe = params.variants[variant]
    measured, measured_first = result.measurement, reference.measurement
    same_device = device_name(measured.device) == device_name(measured_first.device)
    same_memory = same_device and measured.peak_memory_kind == measured_first.peak_memory_kind
    if result is reference:
        difference = PairedDifference(0.0, (0.0, 0.0))
    else:
        difference = paired_bootstrap(
            reference.losses, result.losses, samples=params.evaluation.bootstrap_samples, seed=params.seed
        )
    return Row(
        variant=variant,
        precision=recipe.precision,
        recompute=_recompute_word(recipe.recompute),
        compile=recipe.compile,
        micro_batch_size=result.training.micro_batch_size,
        accumulation_steps=result.training.accumulation_steps,
        tokens=result.training.tokens,
        validation_bits_per_byte=result.evaluation.bits_per_byte,
        delta_bits_per_byte=difference.delta_bits_per_byte,
        delta_ci95=difference.ci95,
        tokens_per_second=measured.tokens_per_second,
        speedup=(
            measured.tokens_per_second / measured_first.tokens_per_second
            if same_device and measured_first.tokens_per_second
            else None
        ),
        peak_memory_bytes=measured.peak_memory_bytes,
        peak_memory_kind=measured.peak_memory_kind,
        memory_saved=(
            1 - measured.peak_memory_bytes / measured_first.peak_memory_bytes if same_memory else None
        ),
        predicted_peak_memory_bytes=result.plan.predicted_allocated_bytes,
        prediction_error=_prediction_error(result),
        mfu=measured.mfu,
        compile_seconds=measured.compile_seconds,
        skipped_steps=result.training.skipped_steps,
        device=device_name(measured.device),
        seed=result.training.seed,
    )


def _prediction_error(result: VariantResults) -> float | None:
    plan, measured = result.plan, result.measurement
    same_step = plan.micro_batch_size == result.training.micro_batch_size
    if plan.device != measured.device.kind or not same_step:
        return None
    return plan.predicted_allocated_bytes / measured.peak_memory_bytes - 1


def _recompute_word(recompute: str | BlockGroups | MemoryBudget) -> str:
    match recompute:
        case BlockGroups(every_n_blocks=n):
            return f"every_{n}_blocks"
        case MemoryBudget(budget=share):
            return f"budget_{share:g}"
        case _:
            return recompute


def _check_params(params: Params, variant: str, result: VariantResults) -> None:
    """The files must be of the params of today: a row is labelled with what the params say."""
    plan, training = result.plan, result.training
    checks = [
        ("plan", "micro_batch_size", plan.micro_batch_size, params.variants[variant].micro_batch_size),
        ("plan", "accumulation_steps", plan.accumulation_steps, params.accumulation_steps(variant)),
        ("plan", "sequence_length", plan.sequence_length, params.training.sequence_length),
        ("train", "precision", training.precision, params.variants[variant].precision),
    ]
    for stage, key, found, wanted in checks:
        if found != wanted:
            raise ComparisonError(
                f"{stage}@{variant} ran with {key} {found} and params.yaml says {wanted}; "
                f"run `dvc repro`, which runs again what the change concerns"
            )


def _check_same_work(params: Params, results: Mapping[str, VariantResults]) -> None:
    """Same work or no comparison."""
    other_seed = [variant for variant, r in results.items() if r.training.seed != params.seed]
    if other_seed:
        found = ", ".join(f"{variant} {results[variant].training.seed}" for variant in other_seed)
        raise ComparisonError(
            f"params.yaml says seed {params.seed}, but trained with another: {found}; "
            f"run `dvc repro {_train_targets(other_seed)}`"
        )
    tokens = {variant: result.training.tokens for variant, result in results.items()}
    if len(set(tokens.values())) > 1:
        counts = list(tokens.values())
        most_common = max(counts, key=counts.count)
        odd = [variant for variant, count in tokens.items() if count != most_common]
        found = ", ".join(f"{variant} {count:,}" for variant, count in tokens.items())
        raise ComparisonError(
            f"the variants trained on different numbers of tokens ({found}), so their losses cannot "
            f"be compared; run `dvc repro --force --single-item {_train_targets(odd)}` and then `dvc repro`"
        )


def _train_targets(variants: list[str]) -> str:
    return " ".join(f"train@{variant}" for variant in variants)
