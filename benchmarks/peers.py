"""This project and its peers side by side on this machine: `python -m benchmarks.peers`, or `make bench`.

Each contender trains the same model on the same data in a process of its own, in turns, and measures itself
with the same code. Writes benchmarks/results/<device>.md and .png.

    python -m benchmarks.peers                                   everything, hours on two cores
    python -m benchmarks.peers --resume                          what an interrupted call left to do
    python -m benchmarks.peers --quick                           one round of a few steps: do they all run?
    python -m benchmarks.peers --work W2 --techniques amp,amp_recompute --contenders frugal,trainer
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.peer_data import make_weights
from benchmarks.peer_environments import PeerEnvironmentError, prepare
from benchmarks.peer_figure import write_figure
from benchmarks.peer_journal import Journal, JournalError
from benchmarks.peer_rounds import run_rounds
from benchmarks.peer_runs import ROOT, Entry, Failure, Machine
from benchmarks.peer_summary import Row, summarise
from benchmarks.peer_table import Conditions, conditions, result_name, summary_lines, write_page
from benchmarks.peer_works import (
    CONTENDERS,
    TECHNIQUES,
    WORKS,
    Technique,
    Work,
    chosen,
    default_techniques,
    default_works,
)
from stages.measure.hardware import HardwareError, select_device
from stages.model.llama import Llama
from stages.params import ModelParams
from stages.training.precision import set_float32_matmul

SEED = 1337
FOLDER = ROOT / ".work" / "bench"
"""The peers' environments, the runs so far, and whatever a run needs for a while."""


@dataclass(frozen=True)
class Plan:
    """What was asked for, checked."""

    device: str
    works: list[Work]
    techniques: list[Technique]
    contenders: list[str]
    entries: list[Entry]
    pythons: dict[str, Path]
    """Interpreters that were given; the other contenders get an environment."""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    # Or the contender that runs would go on alone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        plan = _plan(options)
    except (ValueError, HardwareError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    try:
        return _compare(plan, options)
    except JournalError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("peers: stopped", file=sys.stderr)
        return 130


def _plan(options: argparse.Namespace) -> Plan:
    """
    Raises:
        ValueError: a flag asks for what cannot be.
        HardwareError: there is no such device.
    """
    device = select_device(options.device).type
    if sys.platform != "linux":
        raise ValueError(f"peak memory is read from /proc, which {sys.platform} has not; run it on Linux")
    works = [WORKS[name] for name in chosen(options.work, list(WORKS), default_works(device), "--work")]
    if device == "cpu" and any(work.memory_limit_bytes for work in works):
        raise ValueError("--work R is for a GPU, and there is none; use W,W2")
    known = default_techniques(device)
    techniques = [TECHNIQUES[name] for name in chosen(options.techniques, known, known, "--techniques")]
    contenders = chosen(options.contenders, CONTENDERS, CONTENDERS, "--contenders")
    columns = (True,) if options.switched_only else (False, True)
    entries = [Entry(contender, switched) for contender in contenders for switched in columns]
    return Plan(device, works, techniques, contenders, entries, _given_pythons(options.python))


def _compare(plan: Plan, options: argparse.Namespace) -> int:
    """Run all of it; 1 where a contender failed or did other work.

    Raises:
        JournalError: there is nothing to go on with.
    """
    folder = FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    is_part = not options.resume and (
        options.quick or options.switched_only or options.work or options.techniques or options.contenders
    )
    setting = set_float32_matmul("fp32", torch.device(plan.device))
    with tempfile.TemporaryDirectory(prefix="peers-", dir=folder) as scratch:
        seconds, pythons = options.timeout_minutes * 60, dict(plan.pythons)
        machine = Machine(plan.device, options.threads, setting, pythons, Path(scratch), seconds, SEED)
        page = conditions(machine, options.warmup_steps, options.steps, os.getloadavg()[0])
        settings = {"torch": page.torch} | {
            name: getattr(options, name) for name in ("threads", "warmup_steps", "steps")
        }
        name = "part" if is_part else result_name(page)
        journal = Journal(folder / f"{name}.jsonl", settings, options.resume)
        output = options.output or (folder if is_part else ROOT / "benchmarks" / "results")
        failures = _environments(plan.contenders, pythons, folder, plan.device, options.pip_args.split())
        can_run = [entry for entry in plan.entries if entry.contender not in failures]
        compiled = Path(scratch) / "compiled" if is_part else folder / "compiled"
        if not options.resume:
            shutil.rmtree(compiled, ignore_errors=True)
        rows: list[Row] = []
        for work in plan.works:
            place = Path(scratch) / work.name
            make_weights(place, work, SEED)
            for technique in plan.techniques:
                began = time.monotonic()
                _add_failures(work, technique, plan.entries, failures, journal)
                counts = (options.rounds, options.warmup_steps, options.steps)
                run_rounds(work, technique, can_run, machine, journal, place, compiled, *counts)
                minutes = (time.monotonic() - began) / 60
                print(f"{work.name} {technique.name}: {minutes:.1f} minutes", file=sys.stderr, flush=True)
                # After each: who stops the hours half-way has what there is.
                rows = _write(output, journal, page)
    return _verdict(rows, output / f"{result_name(page)}.md")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--work", help=f"of {', '.join(WORKS)} (default: W,W2, on a GPU also R)")
    parser.add_argument("--techniques", help=f"of {', '.join(TECHNIQUES)}")
    parser.add_argument("--contenders", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, help="runs of each contender, in turns (default 3)")
    parser.add_argument(
        "--steps", type=int, help="counted steps of a run (default 10); of 4 micro-batches a quarter as many"
    )
    parser.add_argument("--warmup-steps", type=int, help="steps before them (default 3)")
    parser.add_argument("--quick", action="store_true", help="one round of two steps after one")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="run only what earlier calls with these settings lack; the page holds all",
    )
    parser.add_argument("--switched-only", action="store_true", help="leave out the column as it comes")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="CPU threads of one operation (default torch's)")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="CONTENDER=PATH",
        help="run a contender with this interpreter, which has its packages, and install nothing for it",
    )
    parser.add_argument("--pip-args", default=os.environ.get("PIP_ARGS", ""), help="handed to pip")
    parser.add_argument("--timeout-minutes", type=float, default=30.0, help="for one run")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the page (default benchmarks/results; of a part of the runs .work/bench)",
    )
    options = parser.parse_args(arguments)
    quick = {"rounds": 1, "steps": 2, "warmup_steps": 1}
    usual = {"rounds": 3, "steps": 10, "warmup_steps": 3, "threads": torch.get_num_threads()}
    for name, value in (usual | (quick if options.quick else {})).items():
        given = getattr(options, name)
        if given is None:
            setattr(options, name, value)
        elif given < 1:
            parser.error(f"--{name.replace('_', '-')} {given}: must be 1 or more")
    return options


def _given_pythons(given: list[str]) -> dict[str, Path]:
    pythons = {}
    for one in given:
        contender, _, path = one.partition("=")
        if contender not in CONTENDERS or not path:
            raise ValueError(
                f"--python {one}: must be CONTENDER=PATH with one of {', '.join(CONTENDERS)} as contender"
            )
        if not Path(path).is_file():
            raise ValueError(f"--python {one}: there is no such file")
        pythons[contender] = Path(path).absolute()
    return pythons


def _environments(
    contenders: list[str], pythons: dict[str, Path], folder: Path, device: str, pip_arguments: list[str]
) -> dict[str, Failure]:
    """Fill `pythons`; returns why there is none, by contender."""
    failures = {}
    for contender in contenders:
        try:
            if contender not in pythons:
                pythons[contender] = prepare(contender, folder, device, pip_arguments)
        except PeerEnvironmentError as error:
            failures[contender] = Failure(str(error))
    return failures


def _add_failures(
    work: Work, technique: Technique, entries: list[Entry], failures: dict[str, Failure], journal: Journal
) -> None:
    """A contender that could not be installed has its place in every table."""
    for entry in entries:
        if entry.contender in failures:
            runs = journal.runs(work.name, technique.name, entry, work.micro_batch_size)
            journal.add(work.name, technique.name, runs, failures[entry.contender])


def _write(folder: Path, journal: Journal, page: Conditions) -> list[Row]:
    """The page and the figure of all runs that there are; returns its rows."""
    parameters = {
        work: _parameters(WORKS[work]) for work in WORKS if any(work == key[0] for key in journal.found)
    }
    rows = []
    versions: dict[str, str] = {}
    for work, technique in sorted(journal.found, key=_usual_order):
        runs = list(journal.found[work, technique].values())
        runs.sort(key=lambda one: (CONTENDERS.index(one.entry.contender), one.entry.switched))
        rows += summarise(work, technique, runs, parameters[work])
        for result in (result for one in runs for result in one.results):
            versions |= {name: number for name, number in result.versions.items() if name != "torch"}
    folder.mkdir(parents=True, exist_ok=True)
    name = result_name(page)
    write_page(folder / f"{name}.md", rows, parameters, versions, page)
    write_figure(folder / f"{name}.png", rows, parameters, page)
    return rows


def _usual_order(key: tuple[str, str]) -> tuple[int, int]:
    return list(WORKS).index(key[0]), list(TECHNIQUES).index(key[1])


def _parameters(work: Work) -> int:
    with torch.device("meta"):
        model = Llama(ModelParams(**work.model), work.vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


def _verdict(rows: list[Row], path: Path) -> int:
    """1 where a contender failed or did other work."""
    for line in summary_lines(rows):
        print(line)
    print(path)
    failed = [row for row in rows if row.failure is not None]
    for row in failed:
        print(f"{row.work} {row.technique}: {row.entry.name}: {row.failure}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
