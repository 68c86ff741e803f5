"""Predict what a variant needs and whether it fits: `python -m stages.plan [VARIANT]`.

With a variant it writes results/plan/VARIANT.json and its timeline, the `plan` stage's outs, and decides what
the variant leaves to it (`micro_batch_size: auto`, `fit: auto`). Without one it prints a table of all of them
on a few GPUs. `--explain VARIANT` draws memory over one step. Needs no data and no GPU.
"""

import argparse
import csv
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from stages.interruption import run_interruptible
from stages.measure.flops import model_flops_per_token, parameter_count
from stages.measure.forecast import no_forecast_reason
from stages.measure.targets import TargetError, find_target
from stages.measure.units import readable_bytes
from stages.memory.candidates import candidates_of
from stages.memory.fit import Considered, FitError, Predictions, fit_variant, forecast_of, largest_micro_batch
from stages.memory.machine import machine_of, unsupported
from stages.memory.make_up import CATEGORIES, Timeline
from stages.memory.prediction import MemoryPrediction
from stages.outs import write_out
from stages.params import Params, ParamsError, VariantParams, load_params
from stages.plan_table import fit_table, make_up_table
from stages.planned import PLAN_FOLDER, plan_digest
from stages.report.memory_timeline import draw_memory_timeline, read_memory_timeline

COMPONENTS = ("parameters", "gradients", "optimizer_state", "activations", "logits_and_loss", "temporaries")
EXPLAIN_FOLDER = Path("results/explain")
"""Not beside the plans: compare depends on that folder."""
COMMON_TARGETS = ("rtx_3060_12gb", "rtx_4090", "l40s", "a100_80gb")
"""Columns of the table where nothing else is asked for."""


def plan(params: Params, variant: str, predictions: Predictions | None = None) -> dict[str, Any]:
    """What results/plan/VARIANT.json holds; the same params give the same plan on any machine.

    Bytes are of each of training.ranks, FLOPs and the forecast of all together. The components are those of
    the peak's moment and add up to it.

    Raises:
        FitError: nothing that the variant may be fits, or its precision is none of the target's.
    """
    if predictions is None:
        predictions = Predictions(params, machine_of(params.hardware))
    machine = predictions.machine
    _refuse_unsupported(predictions, variant)
    fit = fit_variant(predictions, variant)
    recipe = fit.recipe
    memory = predictions.of(recipe)
    vocab_size, training = params.tokenizer.vocab_size, params.training
    flops_per_token = model_flops_per_token(params.model, vocab_size, training.sequence_length)
    return {
        "variant": variant,
        "params_digest": plan_digest(params, variant),
        "micro_batch_size": recipe.micro_batch_size,
        "accumulation_steps": recipe.accumulation_steps(training.global_batch_size, training.ranks),
        "ranks": training.ranks,
        "parallelism": recipe.parallelism,
        "sequence_length": training.sequence_length,
        "techniques": recipe.model_dump(mode="json"),
        "predicted_peak_memory_bytes": memory.peak_bytes,
        "peak_moment": memory.moment,
        "components": {name: getattr(memory, name) for name in COMPONENTS},
        "activations_by_kind": memory.activations_by_kind,
        "predicted_allocated_bytes": memory.allocated_bytes,
        "allowances": predictions.allowances(recipe),
        "needed_memory_bytes": predictions.needed_bytes(recipe),
        "host_memory_bytes": memory.host_bytes,
        "accuracy": memory.accuracy,
        "device": machine.device,
        **_fit_facts(predictions, recipe),
        "forecast": _forecast_facts(predictions, recipe),
        "considered": [_considered_facts(entry) for entry in fit.considered],
        "parameter_count": parameter_count(params.model, vocab_size),
        "model_flops_per_token": flops_per_token,
        "step_model_flops": flops_per_token * training.global_batch_size * training.sequence_length,
        "method": memory.method,
    }


def _refuse_unsupported(predictions: Predictions, variant: str) -> None:
    params = predictions.params
    if reason := unsupported(params.model, params.variants[variant], predictions.machine):
        raise FitError(f"variants.{variant}: {reason}")


def _fit_facts(predictions: Predictions, recipe: VariantParams) -> dict[str, Any]:
    """Whether the recipe fits the machine, and up to which micro-batch; null where there is no capacity."""
    machine = predictions.machine
    facts: dict[str, Any] = {
        "target": machine.target.name if machine.target else None,
        "memory_bytes": machine.memory_bytes,
        "memory_reserve_bytes": machine.reserve_bytes,
        "capacity_bytes": machine.capacity_bytes,
        "fits": None,
        "largest_micro_batch_that_fits": None,
        "next_larger": None,
    }
    if machine.capacity_bytes is None:
        return facts
    (sized,) = candidates_of(predictions.params, recipe)
    found = largest_micro_batch(predictions, sized)
    facts["fits"] = predictions.fits(recipe)
    facts["largest_micro_batch_that_fits"] = found.recipe.micro_batch_size if found.recipe else None
    if found.next_larger is not None:
        facts["next_larger"] = {
            "micro_batch_size": found.next_larger.micro_batch_size,
            "needed_memory_bytes": predictions.needed_bytes(found.next_larger),
        }
    return facts


def _forecast_facts(predictions: Predictions, recipe: VariantParams) -> dict[str, Any]:
    """Pairs are (best case, worst case); or why there is no forecast."""
    forecast = forecast_of(predictions.params, recipe, predictions.machine)
    if forecast is None:
        return {"none": no_forecast_reason(recipe, predictions.machine.target)}
    return {
        key: None if value is None else [float(f"{number:.4g}") for number in value]
        for key, value in asdict(forecast).items()
    }


def _considered_facts(entry: Considered) -> dict[str, Any]:
    recipe = entry.recipe.model_dump(
        mode="json", include={"micro_batch_size", "recompute", "loss", "parallelism"}
    )
    speeds = entry.forecast.tokens_per_second if entry.forecast else None
    return recipe | {
        "needed_memory_bytes": entry.needed_bytes,
        "forecast_tokens_per_second": [round(speed) for speed in speeds] if speeds else None,
        "verdict": entry.verdict,
    }


def timeline_csv(timeline: Timeline) -> str:
    """`event,phase,` and a column of live bytes for each of CATEGORIES, over the second step."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["event", "phase", *CATEGORIES])
    phases = iter([*timeline.phases, (sys.maxsize, "")])
    name, (following, following_name) = "", next(phases)
    for place, event in enumerate(timeline.event):
        while event >= following:
            name = following_name
            following, following_name = next(phases)
        writer.writerow([event, name, *(timeline.live_bytes[kind][place] for kind in CATEGORIES)])
    return text.getvalue()


def write_plan(params: Params, variant: str) -> dict[str, Any]:
    """Write a variant's plan and its timeline as the `plan` stage's outs; returns the plan.

    Raises:
        FitError, OSError: nothing is written.
    """
    predictions = Predictions(params, machine_of(params.hardware))
    content = plan(params, variant, predictions)
    memory = predictions.of(VariantParams(**content["techniques"]))
    write_out(PLAN_FOLDER / f"{variant}.timeline.csv", timeline_csv(memory.timeline))
    write_out(PLAN_FOLDER / f"{variant}.json", json.dumps(content, indent=2) + "\n")
    return content


def _told(content: dict[str, Any]) -> str:
    """A plan as one sentence."""
    needed, capacity = content["needed_memory_bytes"], content["capacity_bytes"]
    ranks, host = content["ranks"], content["host_memory_bytes"]
    of_each = f" of each of {ranks} ranks ({content['parallelism']})" if ranks > 1 else ""
    in_host = f", {readable_bytes(host)} in host memory" if host else ""
    told = (
        f"{content['variant']}: micro-batch {content['micro_batch_size']}, predicted peak{of_each} "
        f"{readable_bytes(content['predicted_peak_memory_bytes'])} at {content['peak_moment']}{in_host}"
    )
    if capacity is None:
        return told
    if content["fits"]:
        return f"{told}; {readable_bytes(needed)} with allowances fits {readable_bytes(capacity)}"
    largest = content["largest_micro_batch_that_fits"]
    change = f"set micro_batch_size: {largest}" if largest else "see `python -m stages.plan` for what would"
    return (
        f"{told}; {readable_bytes(needed)} with allowances does NOT fit {readable_bytes(capacity)}: {change}"
    )


def explain(params: Params, variant: str, path: Path) -> MemoryPrediction:
    """Draw memory over one step of a variant as a PNG.

    Raises:
        FitError, OSError: nothing is drawn.
    """
    predictions = Predictions(params, machine_of(params.hardware))
    _refuse_unsupported(predictions, variant)
    recipe = fit_variant(predictions, variant).recipe
    memory = predictions.of(recipe)
    ranks = params.training.ranks
    drawing = draw_memory_timeline(
        f"{variant}, micro-batch {recipe.micro_batch_size}"
        + (f", one of {ranks} ranks ({recipe.parallelism})" if ranks > 1 else ""),
        read_memory_timeline(timeline_csv(memory.timeline)),
        predictions.allowances(recipe),
        predictions.machine.capacity_bytes,
    )
    write_out(path, drawing)
    return memory


def for_target(params: Params, name: str) -> Params:
    """The params planned for another GPU.

    Raises:
        TargetError: there is no GPU of this name.
    """
    if name == "cpu":
        update: dict[str, Any] = {"target": "cpu", "device": "cpu"}
    else:
        update = {"target": find_target(name).name, "device": "cuda", "memory_gib": None}
    return params.model_copy(update={"hardware": params.hardware.model_copy(update=update)})


def print_tables(params: Params, targets: list[str]) -> None:
    """All variants: what their peaks are made of on the first machine, and where they fit."""
    hardware = params.hardware
    if targets:
        planned_for = [for_target(params, name) for name in targets]
    else:
        planned_for = [params]
        if not hardware.has_capacity and hardware.device != "cpu":
            planned_for += [for_target(params, name) for name in COMMON_TARGETS]
    console = Console()
    if not console.is_terminal:  # a pipe or a log: as wide as the table is
        console = Console(width=150)
    made: dict[object, MemoryPrediction] = {}
    with Console(stderr=True).status("predicting") as status:
        columns = [
            Predictions(p, machine_of(p.hardware), lambda what: status.update(f"predicting {what}"), made)
            for p in planned_for
        ]
        tables = [make_up_table(columns[0])]
        with_capacity = [column for column in columns if column.machine.capacity_bytes is not None]
        if with_capacity:
            tables.append(fit_table(with_capacity))
    for table in tables:
        console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.plan", description=__doc__.split("\n")[0])
    parser.add_argument("variant", nargs="?", help="a name under variants: in the params; none: print all")
    parser.add_argument("--params", default="params.yaml", help="the params file (default: %(default)s)")
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        help="a GPU to plan for instead of hardware.target; repeatable",
    )
    parser.add_argument("--explain", metavar="VARIANT", help="draw memory over one step of this variant")
    parser.add_argument("--out", help="file of the drawing (default: results/explain/VARIANT.png)")
    options = parser.parse_args(arguments)
    variant = options.explain or options.variant
    name = "plan" if variant is None else f"plan {variant}"
    return run_interruptible(name, lambda: _run(options, variant))


def _run(options: argparse.Namespace, variant: str | None) -> int:
    try:
        if options.variant and options.target:
            raise TargetError(
                "--target is for looking: what is written follows params.yaml; set hardware.target there"
            )
        params = load_params(options.params)
        if options.variant and options.params != "params.yaml":
            raise TargetError(
                "--params is for looking: what is written is for params.yaml; copy the other file over it"
            )
        if variant is None:
            print_tables(params, options.target)
            return 0
        params.require_variant(variant)
        if options.explain:
            if options.target:
                params = for_target(params, options.target[-1])
            path = Path(options.out or EXPLAIN_FOLDER / f"{variant}.png")
            memory = explain(params, variant, path)
            print(f"{variant}: fullest at {memory.moment}; drawn to {path}")
        else:
            print(_told(write_plan(params, variant)))
    except (ParamsError, TargetError, FitError) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or PLAN_FOLDER}: cannot write the plan: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
