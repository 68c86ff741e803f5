"""What the pipeline costs beside the training: `python -m benchmarks.pipeline`, or `make bench-pipeline`.

Runs the real stages in a scratch copy of the checkout: start-up, the loop around the step, tokenize beside a
bare encode loop, evaluate, and how each grows with the corpus, the model and the steps. Writes
benchmarks/results/pipeline_<device>.md and .png.

    python -m benchmarks.pipeline                        some ten minutes on two idle cores
    python -m benchmarks.pipeline --quick --out /tmp     one round of everything at its smallest: does it run?
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pipeline_checkout import ROOT, Checkout
from benchmarks.pipeline_figure import write_figure
from benchmarks.pipeline_loop import measure_long_run, measure_loop, with_steps
from benchmarks.pipeline_models import measure_models
from benchmarks.pipeline_page import Findings, conditions, standings, write_page
from benchmarks.pipeline_process import ProcessError
from benchmarks.pipeline_startup import measure_startup
from benchmarks.pipeline_tokenize import measure_tokenizing
from stages.measure.hardware import select_device
from stages.params import ParamsError, load_params


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    model_rounds: int
    loop_steps: int
    saves: int
    long_steps: int
    corpus_bytes: int
    """Of the smallest corpus."""
    factors: tuple[int, ...]
    """By which corpus and model grow."""
    variants: int
    """That `dvc repro` finds made, when it has nothing to do."""


FULL = Size(3, 1, 60, 3, 3200, 2_500_000, (1, 2, 4, 8), 4)
QUICK = Size(1, 1, 20, 2, 320, 2_000_000, (1, 2), 1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one round of everything at its smallest")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="a folder")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    try:
        device = select_device(load_params(ROOT / "params.yaml").hardware.device)
        load = os.getloadavg()[0]
        findings = measure(size)
    except (ProcessError, ParamsError) as error:
        print(f"pipeline benchmark: {error}", file=sys.stderr)
        return 1
    page = conditions(device, size.rounds, load, is_quick=options.quick)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"pipeline_{page.name}"
    write_figure(options.out / f"{name}.png", findings, page)
    write_page(options.out / f"{name}.md", findings, page, f"{name}.png")
    for standing in standings(findings):
        print(f"{'met   ' if standing.is_met else 'MISSED'} {standing.claim}: {standing.found}")
    print(f"\n{options.out / name}.md")
    return 0


def measure(size: Size) -> Findings:
    with tempfile.TemporaryDirectory(prefix="frugal-benchmark-") as scratch:
        untouched = Checkout(Path(scratch) / "untouched")
        every_minutes = untouched.params()["checkpoints"]["every_minutes"]
        untouched.set_params(_short(untouched.params(), size.variants))
        _say("everything once (`dvc repro`)")
        untouched.python("-m", "stages.repro")
        checkout = untouched.copy(Path(scratch) / "checkout")
        _say("start-up")
        startups = measure_startup(untouched, checkout, size.rounds)
        _say("around the step")
        loops = [measure_loop(checkout, size.loop_steps, size.saves) for _ in range(size.rounds)]
        long_run = measure_long_run(checkout, size.long_steps)
        _say("growing models")
        models = measure_models(checkout, size.factors, size.model_rounds)
        _say("growing corpora")
        tokenizing = measure_tokenizing(checkout, size.corpus_bytes, size.factors, size.rounds)
    return Findings(startups, loops, every_minutes * 60, tokenizing, models, long_run)


def _short(params: dict[str, Any], variants: int) -> dict[str, Any]:
    """params.yaml with a training of few steps and little to evaluate; nothing is compiled."""
    few = dict(list(params["variants"].items())[:variants])
    evaluation = params["evaluation"]
    return with_steps(params, 4) | {
        "corpus": {"source": "embedded", "validation_every": 80},
        "evaluation": evaluation | {"samples": evaluation["samples"] | {"max_new_tokens": 4}},
        "variants": {name: variant | {"compile": "off"} for name, variant in few.items()},
    }


_BEGAN = time.monotonic()


def _say(what: str) -> None:
    print(f"{time.monotonic() - _BEGAN:5.0f} s  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
