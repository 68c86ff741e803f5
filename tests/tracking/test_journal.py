import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.tracking.journal import Journal, all_journals, newest_journal, start_journal


def kinds(journal: Journal) -> list[str]:
    return [record["kind"] for record, _ in journal.read()]


@given(st.integers(min_value=0, max_value=10_000))
def test_a_line_torn_by_a_kill_is_never_read_and_the_next_append_removes_it(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        for step in range(20):
            journal.append({"kind": "metrics", "time": 0, "step": step, "metrics": {"loss": 0.1}})
        journal.close()
        whole = journal.path.read_bytes()
        cut = cut % len(whole)
        journal.path.write_bytes(whole[:cut])
        kept = [record["step"] for record, _ in journal.read()]
        assert kept == list(range(whole[:cut].count(b"\n")))
        journal = Journal(Path(folder))
        journal.append({"kind": "metrics", "time": 0, "step": 99, "metrics": {}})
        assert [record["step"] for record, _ in journal.read()] == [*kept, 99]
        journal.close()


def test_reading_goes_on_at_an_offset(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append({"kind": "a"}, {"kind": "b"}, {"kind": "c"})
    ends = [end for _, end in journal.read()]
    assert [record["kind"] for record, _ in journal.read(ends[0])] == ["b", "c"]
    assert list(journal.read(ends[-1])) == []
    assert ends[-1] == journal.size_bytes


def test_processes_that_append_at_once_keep_lines_whole(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from stages.tracking.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for step in range(200): journal.append({'kind': sys.argv[2], 'text': 'x' * step})\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name]) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = kinds(Journal(tmp_path))
    assert {name: found.count(name) for name in "abc"} == {"a": 200, "b": 200, "c": 200}


def test_the_newest_run_of_a_fingerprint(tmp_path: Path) -> None:
    assert newest_journal(tmp_path, "base", "f" * 64) is None
    for _ in range(11):
        start_journal(tmp_path, "base", "f" * 64, "frugal")
    newest = newest_journal(tmp_path, "base", "f" * 64)
    assert newest is not None
    assert newest.folder.name == "11"
    assert newest.name == "base-ffffffffffff (run 11)"
    assert newest_journal(tmp_path, "base", "e" * 64) is None
    assert len(all_journals(tmp_path)) == 11


def test_an_empty_journal_is_no_run(tmp_path: Path) -> None:
    started = start_journal(tmp_path, "base", "f" * 64, "frugal")
    started.path.write_bytes(b'{"kind": "ru')
    assert newest_journal(tmp_path, "base", "f" * 64) is None
    again = start_journal(tmp_path, "base", "f" * 64, "frugal")
    assert newest_journal(tmp_path, "base", "f" * 64) is not None
    assert kinds(again) == ["run"]


@pytest.mark.parametrize(
    ("last", "is_held", "expected"),
    [
        ("RUNNING", False, "KILLED"),
        ("RUNNING", True, "RUNNING"),
        ("FINISHED", False, "FINISHED"),
    ],
)
def test_a_run_nobody_trains_any_more_was_killed(
    tmp_path: Path, last: str, is_held: bool, expected: str
) -> None:
    journal = start_journal(tmp_path, "base", "f" * 64, "frugal")
    journal.append({"kind": "status", "status": last, "time": 1})
    if is_held:
        with journal.locked("tracker.lock") as is_mine:
            assert is_mine
            journal.mark_if_abandoned()
    else:
        journal.mark_if_abandoned()
    assert journal.status() == expected
