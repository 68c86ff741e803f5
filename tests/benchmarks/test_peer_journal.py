from pathlib import Path

import pytest

from benchmarks.peer_journal import Journal, JournalError
from benchmarks.peer_runs import Entry, Failure
from tests.benchmarks.peer_runs_made import result

SETTINGS = {"threads": 2, "steps": 10}
ENTRY = Entry("trainer", True)


def test_what_was_run_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    journal = Journal(path, SETTINGS, resume=False)
    runs = journal.runs("W", "amp", ENTRY, 8)
    journal.add("W", "amp", runs, result(100))
    journal.add("W", "amp", runs, result(200))
    journal.add(
        "W", "amp", journal.runs("W", "amp", Entry("litgpt", True), 8), Failure("out of memory", True)
    )

    again = Journal(path, SETTINGS, resume=True).found["W", "amp"]
    assert again == journal.found["W", "amp"]
    assert [run.tokens_per_second for run in again[ENTRY].results] == [100, 200]
    assert again[Entry("litgpt", True)].failure == Failure("out of memory", True)


def test_without_resume_it_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    journal = Journal(path, SETTINGS, resume=False)
    journal.add("W", "amp", journal.runs("W", "amp", ENTRY, 8), result())
    assert Journal(path, SETTINGS, resume=False).found == {}
    assert Journal(path, SETTINGS, resume=True).found == {}


def test_runs_of_a_smaller_micro_batch_replace_the_larger_ones(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    journal = Journal(path, SETTINGS, resume=False)
    runs = journal.runs("R", "amp", ENTRY, 64)
    journal.add("R", "amp", runs, result(100))
    runs.micro_batch_size = 32
    runs.results.clear()
    journal.add("R", "amp", runs, result(50))
    again = Journal(path, SETTINGS, resume=True).runs("R", "amp", ENTRY, 64)
    assert again.micro_batch_size == 32
    assert [run.tokens_per_second for run in again.results] == [50]


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    Journal(path, SETTINGS, resume=False)
    with pytest.raises(JournalError, match="steps was 10 and is 4; leave --resume off to begin anew"):
        Journal(path, SETTINGS | {"steps": 4}, resume=True)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    Journal(path, SETTINGS, resume=False)
    with path.open("a") as file:
        file.write('{"work": "W", "techn')
    with pytest.raises(JournalError, match="has a line that is no JSON"):
        Journal(path, SETTINGS, resume=True)
