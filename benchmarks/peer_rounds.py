"""The runs of one work and technique, in turns: A B C, then B C A, and so on."""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contenders.job import Job
from benchmarks.peer_data import make_data
from benchmarks.peer_journal import Journal
from benchmarks.peer_runs import Entry, Failure, Machine, job_of, run, smaller
from benchmarks.peer_summary import Runs
from benchmarks.peer_works import Technique, Work


def run_rounds(
    work: Work,
    technique: Technique,
    entries: Sequence[Entry],
    machine: Machine,
    journal: Journal,
    place: Path,
    compiled: Path,
    rounds: int,
    warmup_steps: int,
    steps: int,
) -> None:
    """Run what `journal` lacks of `rounds` runs of every entry.

    Args:
        place: folder with the work's weights; the data go there.
        compiled: folder that the contenders' compile caches are in. A technique finds there what the one
            before it compiled: amp + compile + 4 micro-batches has the kernels of amp + compile.
        warmup_steps: before those that are counted, where a step is one micro-batch; see Technique.steps.
    """
    warmup_steps, steps = technique.steps(warmup_steps), technique.steps(steps)
    make_data(
        place, work, work.micro_batch_size * technique.micro_batches, warmup_steps + steps, machine.seed
    )
    every_job = {
        entry: job_of(work, technique, entry, machine, place, warmup_steps, steps) for entry in entries
    }
    every_runs = {
        entry: journal.runs(work.name, technique.name, entry, work.micro_batch_size) for entry in entries
    }
    for runs in every_runs.values():
        runs.failure = None  # of an earlier call: tried again
    for number in range(rounds):
        shift = number % len(entries)
        for entry in [*entries[shift:], *entries[:shift]]:
            runs = every_runs[entry]
            if runs.failure is None and len(runs.results) <= number:
                cache = compiled / f"{work.name}-{entry.contender}{'-switched' if entry.switched else ''}"
                _run(work, technique, every_job[entry], runs, machine, journal, cache)
                _say(work, technique, number, runs)


def _run(
    work: Work,
    technique: Technique,
    job: Job,
    runs: Runs,
    machine: Machine,
    journal: Journal,
    compile_cache: Path,
) -> None:
    """One run, at the largest micro-batch that fits."""
    while True:
        leaner = smaller(job, work)
        if leaner is not None and job.micro_batch_size > runs.micro_batch_size:
            job = leaner
            continue
        outcome = run(job, machine, compile_cache)
        if isinstance(outcome, Failure) and outcome.out_of_memory and leaner is not None:
            runs.micro_batch_size = leaner.micro_batch_size
            runs.results.clear()
            continue
        journal.add(work.name, technique.name, runs, outcome)
        return


def _say(work: Work, technique: Technique, number: int, runs: Runs) -> None:
    if runs.failure is not None:
        words = runs.failure.reason
    else:
        last = runs.results[-1]
        words = f"{last.tokens_per_second:,.0f} tokens/s, {last.peak_bytes / 2**20:,.0f} MiB"
    line = f"{work.name} {technique.name}, round {number + 1}: {runs.entry.name}: {words}"
    print(line, file=sys.stderr, flush=True)
