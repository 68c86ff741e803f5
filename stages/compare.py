"""Sets the variants side by side: `python -m stages.compare`, the last stage of the pipeline."""

import json
import sys
from pathlib import Path

from rich.console import Console

from stages.interruption import run_interruptible
from stages.outs import write_out
from stages.params import Params, ParamsError, load_params
from stages.planned import PlanError, planned_params
from stages.report.bootstrap import BootstrapError
from stages.report.figures import FIGURES as FIGURE_NAMES
from stages.report.figures import draw_figures
from stages.report.inputs import InputError, VariantFiles
from stages.report.page import html_page, markdown_page
from stages.report.rows import Comparison, ComparisonError, build_comparison
from stages.report.style import DARK, LIGHT
from stages.report.table import terminal_table
from stages.tracking import append_to_run, outs_md5_tags, work_root
from stages.tracking.sync import sync

ROWS = Path("results/compare.json")
MARKDOWN = Path("results/report.md")
HTML = Path("results/report.html")
FIGURES = Path("results/figures")

_WIDTH_WITHOUT_TERMINAL = 120
"""In a log file there is no width to fit; rich would fold the table to 80."""


def variant_files(variant: str) -> VariantFiles:
    """Where the earlier stages put one variant's results, relative to the repository's root."""
    results = Path("results")
    return VariantFiles(
        variant=variant,
        plan=results / "plan" / f"{variant}.json",
        training=Path("models") / variant / "training.json",
        curve=results / "curves" / f"{variant}.csv",
        measurement=results / "measurements" / f"{variant}.json",
        timeline=results / "measurements" / f"{variant}.csv",
        evaluation=results / "evaluate" / f"{variant}.json",
        documents=results / "evaluate" / f"{variant}.documents.csv",
        samples=results / "evaluate" / f"{variant}.samples.md",
    )


def compare(params: Params) -> Comparison:
    """Build the comparison from the files of the earlier stages and write all of its outs.

    Raises:
        InputError, BootstrapError, ComparisonError: see `build_comparison`; nothing is written then.
    """
    comparison = build_comparison(params, {variant: variant_files(variant) for variant in params.variants})
    light = draw_figures(comparison, LIGHT)
    dark = draw_figures(comparison, DARK)
    figures = {name: FIGURES / f"{name}.png" for name in light}
    links = {name: path.relative_to(MARKDOWN.parent).as_posix() for name, path in figures.items()}
    for name, path in figures.items():
        write_out(path, light[name])
    rows = [row.model_dump(mode="json") for row in comparison.rows]
    write_out(MARKDOWN, markdown_page(comparison, links))
    write_out(HTML, html_page(comparison, light, dark))
    write_out(ROWS, json.dumps(rows, indent=2, allow_nan=False) + "\n")
    return comparison


def track(comparison: Comparison) -> list[str]:
    """Add the comparison to each variant's MLflow run and send whatever has not been sent.

    Returns what a reader should know of it: runs that are not there or not whole.
    """
    notes = []
    for row in comparison.rows:
        training = json.loads(variant_files(row.variant).training.read_text())
        ratios = {
            "delta_bits_per_byte",
            "speedup",
            "memory_saved",
            "predicted_peak_memory_bytes",
            "prediction_error",
        }
        try:
            found = append_to_run(
                work_root(),
                row.variant,
                training["fingerprint"],
                metrics=row.model_dump(include=ratios),
                tags=outs_md5_tags(f"evaluate@{row.variant}"),
                artifacts=[FIGURES / f"{name}.png" for name in FIGURE_NAMES],
                folder="figures",
            )
        except OSError as error:
            notes.append(f"{row.variant} could not be tracked: {error}")
            continue
        if not found:
            notes.append(f"no MLflow run of {row.variant} was made here (restored from a cache?)")
    notes += [f"{result.run}: {result.message}" for result in sync(work_root()) if not result.is_complete]
    return notes


def main() -> int:
    """Run the stage; the exit status."""
    return run_interruptible("compare", _run)


def _run() -> int:
    try:
        comparison = compare(planned_params(load_params()))
    except (ParamsError, PlanError, InputError, BootstrapError, ComparisonError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"compare: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
    console.print(terminal_table(comparison, console.width))
    if len(comparison.devices) > 1:
        console.print(
            "The variants ran on different devices: no ratio is given between those.", style="yellow"
        )
    for note in track(comparison):
        console.print(f"tracking: {note}", highlight=False)
    console.print(f"Report: {HTML} (in a browser), {MARKDOWN}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
