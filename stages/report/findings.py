"""What the comparison says in sentences, and what must be known before it is believed."""

from collections.abc import Iterator
from dataclasses import dataclass

from stages.report import units
from stages.report.rows import Comparison, Row

_FEW_DOCUMENTS = 30


@dataclass(frozen=True)
class Finding:
    """One variant against the reference."""

    variant: str
    memory: str
    speed: str
    loss: str


def findings(comparison: Comparison) -> list[Finding]:
    return [Finding(row.variant, _memory(row), _speed(row), _loss(row)) for row in comparison.rows[1:]]


def _memory(row: Row) -> str:
    if row.memory_saved is None:
        return f"{units.memory(row.peak_memory_bytes)} peak memory on {row.device}, no ratio"
    if abs(row.memory_saved) < 0.005:
        return "the same peak memory"
    word = "less" if row.memory_saved > 0 else "more"
    return f"{units.percent(abs(row.memory_saved))} {word} peak memory"


def _speed(row: Row) -> str:
    if row.speedup is None:
        return f"{units.rate(row.tokens_per_second)} tokens/s on {row.device}, no ratio"
    return f"{units.ratio(row.speedup)} the speed"


def _loss(row: Row) -> str:
    delta = f"{units.signed(row.delta_bits_per_byte)} bits per byte"
    if row.delta_ci95 is None:
        return delta
    low, high = row.delta_ci95
    if max(abs(low), abs(high)) < 0.00005:
        return "the same bits per byte to four decimals"
    verdict = "worse" if low > 0 else "better" if high < 0 else "no difference shown"
    return f"{delta}, 95 % interval {units.signed(low)} to {units.signed(high)}: {verdict}"


def conditions(comparison: Comparison) -> list[tuple[str, str]]:
    """What all rows share, as (name, value)."""
    result = next(iter(comparison.results.values()))
    evaluated = result.evaluation
    kinds = dict.fromkeys(row.peak_memory_kind for row in comparison.rows)
    shared = [
        ("device" if len(comparison.devices) == 1 else "devices", "; ".join(comparison.devices)),
        ("model", f"{units.count(result.plan.parameter_count)} parameters"),
        (
            "work",
            (
                f"{units.count(comparison.reference.tokens)} tokens in {result.training.steps:,} steps, "
                f"seed {comparison.reference.seed}"
            ),
        ),
        ("validation", f"{evaluated.documents:,} documents, {units.text_size(evaluated.bytes)} of text"),
        ("peak memory", "; ".join(kinds)),
        ("predicted memory", f"{result.plan.method}, before training"),
        (
            "interval",
            f"paired bootstrap over the validation documents, {comparison.bootstrap_samples:,} draws",
        ),
    ]
    sources = [r.measurement.peak_flops_source for r in comparison.results.values()]
    named = dict.fromkeys(source for source in sources if source)
    if named:
        shared.append(("MFU", f"against {'; '.join(named)}"))
    return shared


def caveats(comparison: Comparison) -> Iterator[str]:
    """Sentences on how far the numbers reach."""
    rows = comparison.rows
    kinds = {result.measurement.device.kind for result in comparison.results.values()}
    if len(comparison.devices) > 1:
        places = "; ".join(
            f"{device}: {', '.join(row.variant for row in rows if row.device == device)}"
            for device in comparison.devices
        )
        yield (
            f"The variants ran on different devices ({places}). Their speed and memory must not be set "
            f"against each other; no ratio is given against a reference on another device. To compare "
            f"them, train them all on one machine."
        )
    if "cpu" in kinds:
        yield (
            "CPU figures: peak memory is counted in live tensor bytes, without the allocator's and the "
            "program's own share, and speed says nothing about a GPU, where other kernels run."
        )
    if len(rows) > 1:
        yield (
            "The interval is about the choice of validation documents. Each variant was trained once, "
            "with one seed, so it does not hold the difference that another seed would make."
        )
    documents = next(iter(comparison.results.values())).evaluation.documents
    if documents == 1:
        yield "There is one validation document, so no interval can be given."
    elif documents < _FEW_DOCUMENTS:
        yield f"{documents} validation documents are few: the interval is rough and tends to be too narrow."
    if any(row.compile_seconds for row in rows):
        yield ("Wall-clock time includes compilation, tokens/s does not; a longer run pays for it once.")
    if any(row.skipped_steps for row in rows):
        skipped = ", ".join(f"{row.variant} {row.skipped_steps}" for row in rows if row.skipped_steps)
        yield (
            f"Steps whose loss or gradients were no number were skipped ({skipped}); a GradScaler finds its "
            "scale that way, any other precision should not."
        )
    elsewhere = [name for name, r in comparison.results.items() if r.plan.device != r.measurement.device.kind]
    if elsewhere:
        yield (
            f"The peak of {', '.join(elsewhere)} was predicted for another kind of device than trained it, "
            "so no error is given; set hardware.device to the one that trains."
        )
    for name, result in comparison.results.items():
        if result.training.out_of_memory:
            yield (
                f"{name} ran out of memory and went on with micro-batches of "
                f"{result.training.micro_batch_size} instead of {result.plan.micro_batch_size} (after step "
                f"{', '.join(str(halving['after_step']) for halving in result.training.out_of_memory)}); its "
                "peak is that of the smaller ones."
            )
