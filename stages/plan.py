"""Predict a variant's peak memory and FLOPs from params alone: `python -m stages.plan [VARIANT]`.

With a variant it writes results/plan/VARIANT.json, the `plan` stage's out; without one it prints a
table of all of them. Needs no data and no GPU.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stages.interruption import run_interruptible
from stages.measure.flops import model_flops_per_token, parameter_count
from stages.memory import predict
from stages.outs import write_out
from stages.params import Params, ParamsError, load_params

OUT_FOLDER = Path("results/plan")
COMPONENTS = ("parameters", "gradients", "optimizer_state", "activations", "logits_and_loss")


def plan(params: Params, variant: str) -> dict[str, Any]:
    """What results/plan/VARIANT.json holds; the same params give the same plan on any machine.

    The components are those of the peak's moment and add up to it.
    """
    recipe = params.variants[variant]
    vocab_size = params.tokenizer.vocab_size
    sequence_length = params.training.sequence_length
    memory = predict(params.model, vocab_size, params.training, recipe, params.hardware.device)
    flops_per_token = model_flops_per_token(params.model, vocab_size, sequence_length)
    return {
        "variant": variant,
        "micro_batch_size": recipe.micro_batch_size,
        "accumulation_steps": params.accumulation_steps(variant),
        "sequence_length": sequence_length,
        "predicted_peak_memory_bytes": memory.peak_bytes,
        "peak_moment": memory.moment,
        "components": {name: getattr(memory, name) for name in COMPONENTS},
        "parameter_count": parameter_count(params.model, vocab_size),
        "model_flops_per_token": flops_per_token,
        "step_model_flops": flops_per_token * params.training.global_batch_size * sequence_length,
        "method": "analytic",
    }


def write_plan(params: Params, variant: str) -> Path:
    """Write a variant's plan as the `plan` stage's out."""
    path = OUT_FOLDER / f"{variant}.json"
    write_out(path, json.dumps(plan(params, variant), indent=2) + "\n")
    return path


def plan_table(params: Params) -> Table:
    """All variants: predicted peak and what it is made of."""
    table = Table(
        title="Predicted peak memory of a step (analytic, eager; compiled variants need less)",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("variant", overflow="fold")
    for column in ("micro-batch", "accum.", "peak", "weights", "grads", "optim.", "activ.", "logits"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fullest at", overflow="fold")
    for name in params.variants:
        row = plan(params, name)
        table.add_row(
            name,
            str(row["micro_batch_size"]),
            str(row["accumulation_steps"]),
            _readable(row["predicted_peak_memory_bytes"]),
            *(_readable(row["components"][component]) for component in COMPONENTS),
            row["peak_moment"],
        )
    return table


def _readable(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.plan", description=__doc__.split("\n")[0])
    parser.add_argument("variant", nargs="?", help="a name under variants: in the params; none: print all")
    parser.add_argument("--params", default="params.yaml", help="the params file (default: %(default)s)")
    options = parser.parse_args(arguments)
    name = "plan" if options.variant is None else f"plan {options.variant}"
    return run_interruptible(name, lambda: _run(options.params, options.variant))


def _run(params_file: str, variant: str | None) -> int:
    try:
        params = load_params(params_file)
        if variant is not None:
            params.require_variant(variant)
    except ParamsError as error:
        print(error, file=sys.stderr)
        return 1
    if variant is None:
        console = Console()
        if not console.is_terminal:  # a pipe or a log: as wide as the table is
            console = Console(width=150)
        console.print(plan_table(params))
        return 0
    try:
        path = write_plan(params, variant)
    except OSError as error:
        print(f"{OUT_FOLDER}: cannot write the plan: {error}", file=sys.stderr)
        return 1
    print(f"{variant}: plan written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
