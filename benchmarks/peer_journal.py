"""Every run as one line of a file, so that hours of runs can be cut in pieces."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.contenders.job import Result
from benchmarks.peer_runs import Entry, Failure
from benchmarks.peer_summary import Runs

Found = dict[tuple[str, str], dict[Entry, Runs]]
"""By (work, technique), in the order in which they were begun."""


class JournalError(RuntimeError):
    """The runs of an earlier call cannot be gone on with; one sentence says why."""


class Journal:
    """Runs of one or several calls with the same settings."""

    def __init__(self, path: Path, settings: dict[str, Any], resume: bool):
        """
        Args:
            settings: what makes runs comparable; the first line of the file.
            resume: keep the lines of earlier calls; else begin a new file.

        Raises:
            JournalError: the earlier calls had other settings, or the file is no journal.
        """
        self.path = path
        self.found: Found = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self._read(settings)
        else:
            path.write_text(json.dumps(settings) + "\n")

    def runs(self, work: str, technique: str, entry: Entry, micro_batch_size: int) -> Runs:
        """What there is of one entry; its list of results grows with `add`."""
        entries = self.found.setdefault((work, technique), {})
        return entries.setdefault(entry, Runs(entry, micro_batch_size=micro_batch_size))

    def add(self, work: str, technique: str, runs: Runs, outcome: Result | Failure) -> None:
        """One run more, in memory and in the file."""
        line = {
            "work": work,
            "technique": technique,
            "entry": asdict(runs.entry),
            "micro_batch_size": runs.micro_batch_size,
            "result" if isinstance(outcome, Result) else "failure": asdict(outcome),
        }
        _take(runs, outcome)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self, settings: dict[str, Any]) -> None:
        advice = "leave --resume off to begin anew"
        lines = self.path.read_text().splitlines()
        try:
            earlier, *written = [json.loads(line) for line in lines]
        except ValueError:
            raise JournalError(f"{self.path} has a line that is no JSON; {advice}") from None
        if earlier != settings:
            keys = sorted(set(earlier) | set(settings))
            other = [key for key in keys if earlier.get(key) != settings.get(key)]
            was = ", ".join(f"{key} was {earlier.get(key)} and is {settings.get(key)}" for key in other)
            raise JournalError(f"the runs in {self.path} had other settings: {was}; {advice}")
        for line in written:
            runs = self.runs(
                line["work"], line["technique"], Entry(**line["entry"]), line["micro_batch_size"]
            )
            if line["micro_batch_size"] != runs.micro_batch_size:
                runs.micro_batch_size = line["micro_batch_size"]
                runs.results.clear()
            _take(runs, Result(**line["result"]) if "result" in line else Failure(**line["failure"]))
        print(f"going on with {len(written)} runs of {self.path}", file=sys.stderr)


def _take(runs: Runs, outcome: Result | Failure) -> None:
    if isinstance(outcome, Failure):
        runs.failure = outcome
    else:
        runs.failure = None
        runs.results.append(outcome)
