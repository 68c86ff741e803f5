"""Processes that encode: all units are done by any number of them, and none outlives who started it."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.data import sources
from stages.data.documents import CorpusError
from stages.data.encoding import EncodingJob
from stages.data.encoding_pool import EncodingError, encode_units
from stages.data.sources import Unit, corpus_units
from tests.data.small_job import WORDS, content, corpus_of, encode_all, job_of

TEXTS = [f"{number} {WORDS}" for number in range(60)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EncodingJob:
    monkeypatch.setattr(sources, "UNIT_BYTES", 800)
    return job_of(tmp_path / "work", corpus_of(tmp_path, TEXTS), 300)


def processes() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


@pytest.mark.parametrize("workers", [1, 3])
def test_all_units_are_encoded_and_told(tmp_path: Path, job: EncodingJob, workers: int) -> None:
    wanted = job_of(tmp_path / "wanted", job.corpus, 300)  # type: ignore[arg-type]
    units = corpus_units(job.corpus)
    assert len(units) > 6
    encode_all(wanted, units)
    events = list(encode_units(job, units, workers))
    assert sorted(event.unit.number for event in events if event.is_whole) == [u.number for u in units]
    assert sum(event.num_bytes for event in events) == sum(len(text.encode()) for text in TEXTS)
    assert content(job.folder) == content(wanted.folder)
    assert processes() == []


def test_closing_ends_the_processes(job: EncodingJob) -> None:
    with contextlib.closing(encode_units(job, corpus_units(job.corpus), 2)) as events:
        next(events)
        assert len(processes()) == 2
    assert processes() == []


def test_a_corpus_that_cannot_be_read_is_said_as_by_one_process(job: EncodingJob) -> None:
    units = corpus_units(job.corpus)
    path = units[0].parts[0].path
    path.write_bytes(path.read_bytes()[:-1] + b"\xff\n")
    with pytest.raises(CorpusError, match=r"corpus\.jsonl: not UTF-8 at byte \d+ \(0xff\)"):
        list(encode_units(job, units, 2))
    assert processes() == []


def test_a_disk_that_is_not_there_is_said_as_by_one_process(job: EncodingJob, tmp_path: Path) -> None:
    gone = EncodingJob(job.corpus, job.tokenizer, job.tokenizer_sha256, 320, tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="gone"):
        list(encode_units(gone, corpus_units(job.corpus), 2))


def test_a_killed_process_is_said(job: EncodingJob) -> None:
    units = [*corpus_units(job.corpus)] * 50
    with pytest.raises(EncodingError, match=r"was killed by SIGKILL; .* goes on from the parts"):
        for number, _ in enumerate(encode_units(job, units, 2)):
            if number == 0:
                os.kill(processes()[0], signal.SIGKILL)
    assert processes() == []


_PARENT = """
import pickle, sys, multiprocessing
from stages.data.encoding_pool import encode_units
job, units = pickle.load(open(sys.argv[1], "rb"))
for event in encode_units(job, units, 2):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_parent_leaves_no_process(job: EncodingJob, tmp_path: Path) -> None:
    large: list[Unit] = [*corpus_units(job.corpus)] * 1000
    (tmp_path / "job").write_bytes(pickle.dumps((job, large)))
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "job")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(is_running(pid) for pid in pids)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process that encodes outlived its parent"
        time.sleep(0.02)
