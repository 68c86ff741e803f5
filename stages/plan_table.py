"""The plans of all variants as tables for a terminal: what peaks are made of, and what fits where."""

from rich.table import Table

from stages.measure.units import readable_bytes
from stages.memory.candidates import candidates_of, recipe_words
from stages.memory.fit import FitError, Predictions, fit_variant, forecast_of, largest_micro_batch
from stages.memory.leaner_recipes import change_that_fits
from stages.memory.machine import unsupported
from stages.params import VariantParams, VariantToPlan
from stages.report.units import rate

_COMPONENTS = ("parameters", "gradients", "optimizer_state", "activations", "logits_and_loss", "temporaries")


def make_up_table(predictions: Predictions) -> Table:
    """All variants: predicted peak and what it is made of."""
    training = predictions.params.training
    whose = f" on each of {training.ranks} ranks" if training.ranks > 1 else ""
    table = Table(
        title=f"Predicted peak of live tensors in a step{whose}, {predictions.machine.device} kernels",
        caption="≈: compiled, an estimate.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("variant", overflow="fold")
    headings: tuple[str, ...] = (
        "micro-batch",
        "accum.",
        "peak",
        "weights",
        "grads",
        "optim.",
        "activ.",
        "logits",
        "temp.",
    )
    if training.ranks > 1:
        headings = ("parallelism", *headings)
    for column in headings:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fullest at", overflow="fold")
    for name in predictions.params.variants:
        reason = _impossible(predictions, name)
        if reason is None:
            try:
                recipe = fit_variant(predictions, name).recipe
            except FitError as error:
                reason = str(error)
        if reason is not None:
            table.add_row(name, *[""] * len(headings), reason)
            continue
        memory = predictions.of(recipe)
        table.add_row(
            name,
            *([recipe.parallelism] if training.ranks > 1 else []),
            str(recipe.micro_batch_size),
            str(recipe.accumulation_steps(training.global_batch_size, training.ranks)),
            f"{'' if memory.accuracy == 'exact' else '≈ '}{readable_bytes(memory.peak_bytes)}",
            *(readable_bytes(getattr(memory, component)) for component in _COMPONENTS),
            memory.moment,
        )
    return table


def fit_table(columns: list[Predictions]) -> Table:
    """All variants on machines with a capacity: what they need, the largest micro-batch, what to change."""
    ranks = columns[0].params.training.ranks
    each = f" Each of {ranks} ranks has a GPU of its own; tokens/s are of all together." if ranks > 1 else ""
    table = Table(
        title="Does it fit? Needed: the peak and the allowances for CUDA, its libraries and fragmentation",
        caption=(
            "max: the largest micro-batch that fits. tokens/s: a forecast from data-sheet figures, worst to "
            "best case. Capacity: the memory that the driver reports less hardware.memory_reserve_gib." + each
        ),
        title_justify="left",
        caption_justify="left",
        show_lines=True,
    )
    table.add_column("variant", overflow="fold")
    for column in columns:
        capacity = readable_bytes(column.machine.capacity_bytes or 0)
        table.add_column(f"{column.machine.label}\n{capacity}", overflow="fold")
    for name in columns[0].params.variants:
        table.add_row(name, *(_cell(column, name) for column in columns))
    return table


def _cell(predictions: Predictions, variant: str) -> str:
    machine, written = predictions.machine, predictions.params.variants[variant]
    if reason := _impossible(predictions, variant):
        return f"no: {reason}"
    try:
        recipe = fit_variant(predictions, variant).recipe
    except FitError as error:
        return f"no: {error}"
    lines = []
    if isinstance(written, VariantToPlan):
        lines.append(f"auto: {recipe_words(recipe)}, micro-batch {recipe.micro_batch_size}")
    lines += _verdict(predictions, recipe)
    forecast = forecast_of(predictions.params, recipe, machine)
    if forecast is not None and predictions.fits(recipe):
        best, worst = forecast.tokens_per_second
        lines.append(f"{rate(worst)} to {rate(best)} tokens/s")
    return "\n".join(lines)


def _impossible(predictions: Predictions, variant: str) -> str | None:
    """Why this machine cannot train the variant at all. Its params were checked for another one."""
    params, written = predictions.params, predictions.params.variants[variant]
    for key, problem in written.conflicts(params.training, params.hardware):
        return f"{key}: {problem}"
    return unsupported(params.model, written, predictions.machine)


def _verdict(predictions: Predictions, recipe: VariantParams) -> list[str]:
    needed = readable_bytes(predictions.needed_bytes(recipe))
    if not predictions.fits(recipe):
        change = change_that_fits(predictions, recipe)
        return [f"no: needs {needed}", f"set {change}" if change else "no change that is known makes it fit"]
    (sized,) = candidates_of(predictions.params, recipe)
    largest = largest_micro_batch(predictions, sized).recipe or recipe
    return [f"fits: {needed}, max {largest.micro_batch_size}"]
