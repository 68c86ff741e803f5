"""The number-format lab: `python -m stages.precision`.

Prints, and writes to results/precision.json, what each floating-point type can hold, what this
device can do with it, and how it rounds. docs/precision.md explains the tables.
"""

import argparse
import hashlib
import json
import math
import string
import sys
import textwrap
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from stages.interruption import run_interruptible
from stages.measure.format_support import YES, measure_speed, try_format
from stages.measure.hardware import Device, HardwareError, MatmulCeiling, describe_device, select_device
from stages.measure.number_formats import NUMBER_FORMATS, NumberFormat, limits, measure_rounding
from stages.outs import write_out
from stages.params import ParamsError, TrackingParams, load_params
from stages.tracking import RunTracker, provenance_tags, work_root

_WIDTH = 120
_OPERATIONS = {
    "create": "create",
    "from_fp32": "from fp32",
    "to_fp32": "to fp32",
    "add": "add",
    "matmul": "matmul",
    "autocast": "autocast",
    "scaled_matmul": "scaled mm",
}


class PrecisionLabError(RuntimeError):
    """The lab cannot run or write its result; the message says what to do."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return run_interruptible("precision", lambda: _run(options), "it is not complete; run it again")


def _run(options: argparse.Namespace) -> int:
    try:
        report = run_lab(select_device(options.device), options.seconds)
        write_report(report, options.output)
    except (HardwareError, PrecisionLabError) as error:
        print(error, file=sys.stderr)
        return 1
    print_report(report)
    track(report, options.output)
    print(f"Written to {options.output}.")
    return 0


def run_lab(device: torch.device, seconds_per_product: float) -> dict[str, Any]:
    """Try and measure every format; the content of results/precision.json.

    Infinities and NaN are the texts "inf", "-inf" and "nan": JSON has no numbers for them.
    """
    rows = [_row(number_format, device, seconds_per_product) for number_format in NUMBER_FORMATS]
    report = {"device": asdict(describe_device(device)), "torch": torch.__version__, "formats": rows}
    return _without_special_floats(report)


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write JSON in one piece: a reader sees the old file or the whole new one.

    Raises:
        PrecisionLabError: the file cannot be written.
    """
    try:
        write_out(path, json.dumps(report, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise PrecisionLabError(
            f"--output: {path} cannot be written ({error.strerror}); name a file in a folder that can"
        ) from None


def track(report: dict[str, Any], path: Path) -> None:
    """Make a run in MLflow with the file and the speeds."""
    identity = json.dumps([report["device"], report["torch"]], sort_keys=True)
    speeds = {
        f"matmul_tflops.{row['name'].replace(' ', '_')}": row["matmul"]["tflops_per_second"]
        for row in report["formats"]
        if row["matmul"] is not None
    }
    with RunTracker(
        work_root(),
        "precision-lab",  # a name that no variant can have
        hashlib.sha256(identity.encode()).hexdigest(),
        _experiment(),
        {},
        provenance_tags() | {"device": report["device"]["name"]},
    ) as tracker:
        tracker.log_summary(speeds)
        tracker.log_artifacts([path])


def _experiment() -> str:
    """Where the training runs are too; the lab itself needs no params file."""
    try:
        return load_params().tracking.experiment
    except ParamsError:
        return TrackingParams().experiment


def _row(number_format: NumberFormat, device: torch.device, seconds_per_product: float) -> dict[str, Any]:
    support = measure_speed(number_format, try_format(number_format, device), device, seconds_per_product)
    found = limits(number_format)
    rounding = measure_rounding(number_format, device)
    return {
        "name": number_format.name,
        "bits": number_format.bits,
        "storage_bits": number_format.storage_bits or number_format.bits,
        "sign_bits": number_format.sign_bits,
        "exponent_bits": number_format.exponent_bits,
        "mantissa_bits": number_format.mantissa_bits,
        "exponent_bias": number_format.bias,
        "specials": number_format.specials,
        "standard": number_format.standard,
        "torch_type": str(number_format.dtype) if number_format.dtype else None,
        "max": _float(found.max),
        "min": _float(found.min),
        "smallest_normal": _float(found.smallest_normal),
        "smallest_subnormal": _float(found.smallest_subnormal),
        "eps": _float(found.eps),
        "limits_source": found.source,
        "support": {operation: getattr(support, operation) for operation in _OPERATIONS},
        "matmul": _product(support.matmul_speed, support.matmul_relative_error),
        "scaled_matmul": _product(support.scaled_matmul_speed, support.scaled_matmul_relative_error),
        "rounding": asdict(rounding) if rounding else None,
    }


def _product(speed: MatmulCeiling | None, relative_error: float | None) -> dict[str, Any] | None:
    if speed is None:
        return None
    return {
        "tflops_per_second": speed.flops_per_second / 1e12,
        "source": speed.source,
        "relative_error": relative_error,
    }


def _float(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


def _without_special_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_special_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_special_floats(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_report(report: dict[str, Any]) -> None:
    """Three tables and the reasons, no wider than 120 columns where the output is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    device = Device(**report["device"])
    where = f"{device.name}, {device.threads} threads" if device.kind == "cpu" else device.name
    where = f"{where}, torch {report['torch']}"
    console.print(_limits_table(report["formats"]))
    console.print(
        "min: lowest. smallest: positive. tf32: 19 bits, which take 32 in memory. fp4: two in a byte.\n"
    )
    reasons: dict[str, str] = {}
    console.print(_support_table(report["formats"], where, reasons))
    console.print("TF/s: median of several. error: relative, against fp64. A letter says why not:")
    for reason, letter in reasons.items():
        console.print(
            textwrap.fill(f" {letter}  {reason}", _WIDTH - 2, subsequent_indent="    "), markup=False
        )
    console.print()
    console.print(_rounding_table(report["formats"], where))
    console.print(
        "+u, -u: smallest change of 1 that survives. 1e-8 × 65536: a gradient scaled as by GradScaler, and\n"
        "scaled back. integer lost: the first not in the type. *: no addition, added in fp32 and cast."
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
    return table


def _limits_table(formats: list[dict[str, Any]]) -> Table:
    table = _table(
        "Floating-point formats",
        "format", "bits", "sign/exp/\nmantissa", "max", "min", "smallest normal", "smallest subnormal", "eps",
        "inf, nan", "limits from",
    )  # fmt: skip
    for row in formats:
        table.add_row(
            row["name"],
            str(row["bits"]),
            f"{row['sign_bits']}/{row['exponent_bits']}/{row['mantissa_bits']}",
            *(_number(row[key]) for key in ("max", "min", "smallest_normal", "smallest_subnormal", "eps")),
            {"inf and nan": "both", "nan": "nan", "none": "neither"}[row["specials"]],
            row["limits_source"],
        )
    return table


def _support_table(formats: list[dict[str, Any]], where: str, reasons: dict[str, str]) -> Table:
    """Cells say yes or a letter; `reasons` is filled with the letter of each distinct answer."""
    columns = [*_OPERATIONS.values(), "matmul TF/s", "error", "scaled TF/s", "error"]
    table = _table(f"What this device does with them: {where}", "format", *columns)
    for row in formats:
        cells = []
        for operation in _OPERATIONS:
            verdict = row["support"][operation]
            if verdict == YES:
                cells.append(YES)
                continue
            reason = _without_type_name(verdict, row)
            letter = reasons.setdefault(reason, string.ascii_letters[len(reasons)])
            cells.append(f"{YES} {letter}" if verdict.startswith(YES) else letter)
        for product in (row["matmul"], row["scaled_matmul"]):
            cells.append(_number(product and product["tflops_per_second"], 3))
            cells.append(_number(product and product["relative_error"], 2))
        table.add_row(row["name"], *cells)
    return table


def _without_type_name(reason: str, row: dict[str, Any]) -> str:
    """The same refusal for several types is one answer."""
    if row["torch_type"]:
        name = row["torch_type"].removeprefix("torch.")
        reason = reason.replace(f"'{name[0].upper()}{name[1:]}'", "this type")
    return reason.replace(f"for {row['name']}", "for it")


def _rounding_table(formats: list[dict[str, Any]], where: str) -> Table:
    table = _table(
        f"How it rounds: {where}",
        "format", "1+eps/2", "1+1.5eps", "+u", "-u", "1, 300 ×\n-1e-4", "overflows\nfrom", "2×max\nbecomes",
        "inf\nbecomes", "1e-8\nbecomes", "1e-8\n× 65536", "integer\nlost",
    )  # fmt: skip
    for row in formats:
        rounding = row["rounding"]
        if rounding is None:
            continue
        mark = "" if rounding["arithmetic"] == "in the format" else "*"
        table.add_row(
            f"{row['name']}{mark}",
            _in_eps(rounding["one_plus_half_eps"], row["eps"]),
            _in_eps(rounding["one_plus_three_half_eps"], row["eps"]),
            *(
                _number(rounding[key], digits)
                for key, digits in (
                    ("least_increase_of_one", 3),
                    ("least_decrease_of_one", 3),
                    ("one_after_small_updates", 4),
                    ("overflows_from", 5),
                    ("cast_of_twice_max", 4),
                    ("cast_of_infinity", 4),
                    ("cast_of_small_gradient", 3),
                    ("small_gradient_with_scale", 3),
                )
            ),
            f"2^{row['mantissa_bits'] + 1}+1",
        )
    return table


def _in_eps(value: float, eps: float) -> str:
    """1.015625 as "1+2eps" where eps is 0.0078125."""
    multiple = (value - 1) / eps
    return "1" if multiple == 0 else "1+eps" if multiple == 1 else f"1+{multiple:.3g}eps"


def _number(value: float | str | None, digits: int = 5) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages.precision", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--output", type=Path, default=Path("results/precision.json"))
    parser.add_argument(
        "--seconds",
        type=_positive_seconds,
        default=0.3,
        help="about the time to spend on each matrix product (default 0.3)",
    )
    return parser


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, found {text}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
