"""The tokenize stage: what it writes, that it is always the same, and that nothing half is left."""

import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from stages.data.special_tokens import BOT_ID, EOT_ID
from stages.data.token_files import TokenFile
from stages.data.token_shards import TokenShards
from stages.data.tokenizer import decode, load_tokenizer
from stages.tokenize_data import main

REPOSITORY = Path(__file__).parents[1]
FILES = {"tokenizer.json", "train.safetensors", "validation.safetensors", "meta.json"}


def write_params(folder: Path, **sections: dict[str, Any]) -> None:
    params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    for name, values in sections.items():
        params[name] = values if name == "corpus" else params[name] | values
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def write_corpus(folder: Path, documents: list[str]) -> dict[str, Any]:
    rows = (json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "corpus.jsonl").write_text("".join(rows))
    return {"source": "files", "paths": ["corpus.jsonl"], "validation_every": 3}


DOCUMENTS = [f"Document {i}: the quick brown [EOT] fox, naïve in {1900 + i}.\n\n" * 5 for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    corpus = write_corpus(tmp_path, DOCUMENTS)
    write_params(tmp_path, corpus=corpus, tokenizer={"vocab_size": 300}, training={"sequence_length": 64})
    return tmp_path


def outs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "data/tokens").iterdir()}


# Units and parts of a few kilobytes, so that a small corpus has many; the product's are of 32 MiB.
SMALL = """
import sys
from stages.data import encoding, sources
sources.UNIT_BYTES, encoding.PART_TEXT_BYTES = 40_000, 15_000
from stages.tokenize_data import main
sys.exit(main())
"""


def run_stage(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SMALL, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: "subprocess.Popen[str]") -> str:
    """Its output, once it has ended well."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def test_the_tokens_are_the_documents_of_each_split(folder: Path) -> None:
    assert main([]) == 0
    tokens = folder / "data/tokens"
    assert {path.name for path in tokens.iterdir()} == FILES
    tokenizer = load_tokenizer(tokens / "tokenizer.json")
    meta = json.loads((tokens / "meta.json").read_text())
    wanted = {
        "train": [text for i, text in enumerate(DOCUMENTS) if i % 3 != 2],
        "validation": [text for i, text in enumerate(DOCUMENTS) if i % 3 == 2],
    }
    for split, documents in wanted.items():
        file = TokenFile.open(tokens / f"{split}.safetensors")
        found = np.split(file.tokens, file.document_offsets[1:-1])
        assert all((ids[0], ids[-1]) == (BOT_ID, EOT_ID) for ids in found)
        assert [decode(tokenizer, ids) for ids in found] == documents
        assert list(file.document_bytes) == [len(text.encode()) for text in documents]
        assert file.metadata["split"] == split
        assert file.metadata["tokenizer_sha256"] == meta["tokenizer"]["sha256"]
        assert meta["splits"][split] == {
            "documents": len(documents),
            "tokens": len(file.tokens),
            "bytes": int(file.document_bytes.sum()),
            "text_sha256": hashlib.sha256("".join(documents).encode()).hexdigest(),
        }
    file_sha256 = hashlib.sha256((tokens / "tokenizer.json").read_bytes()).hexdigest()
    assert file_sha256 == meta["tokenizer"]["sha256"]


def test_the_tokenizer_does_not_depend_on_the_validation_text(folder: Path) -> None:
    assert main([]) == 0
    before = outs(folder)
    write_corpus(folder, [text if i % 3 != 2 else "zzz" * 200 for i, text in enumerate(DOCUMENTS)])
    assert main([]) == 0
    after = outs(folder)
    assert after["tokenizer.json"] == before["tokenizer.json"]
    assert after["train.safetensors"] == before["train.safetensors"]
    assert after["validation.safetensors"] != before["validation.safetensors"]


@pytest.mark.parametrize(
    ("corpus", "training", "message"),
    [
        ({"paths": ["none.txt"]}, {}, "corpus.paths: none.txt names no file"),
        ({"text_column": "body"}, {}, "corpus.jsonl:1: has no column 'body'"),
        ({"validation_every": 41}, {}, "holds only 40; lower it"),
        ({}, {"sequence_length": 512}, ""),
        ({"validation_every": 40}, {"sequence_length": 512}, "the validation split has"),
        ({"validation_every": 1}, {}, "corpus.validation_every"),
    ],
)
def test_a_corpus_that_cannot_be_used_ends_in_one_sentence(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    corpus: dict[str, Any],
    training: dict[str, Any],
    message: str,
) -> None:
    corpus = {"source": "files", "paths": ["corpus.jsonl"], "validation_every": 3} | corpus
    write_params(folder, corpus=corpus, tokenizer={"vocab_size": 300}, training=training)
    assert main([]) == (1 if message else 0)
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors
    if message:
        assert not list(folder.glob("data/*"))


@pytest.fixture
def large(tmp_path: Path, everything: dict[str, bytes]) -> Path:
    """A folder whose corpus has many units, and nothing of it is tokenized."""
    write_large(tmp_path)
    return tmp_path


def write_large(folder: Path) -> None:
    """300 kB in files of every kind, in many units."""
    rows = [f"{number} {text}" for number in range(25) for text in DOCUMENTS]
    write_corpus(folder, rows[:500])
    table = pyarrow.table({"text": rows[500:800]})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=40, compression="none")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in rows[800:])
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    corpus = {"source": "files", "paths": ["*.jsonl", "*.gz", "*.parquet"], "validation_every": 3}
    tokenizer = {"vocab_size": 400, "shard_tokens": 20_000}
    write_params(folder, corpus=corpus, tokenizer=tokenizer, training={"sequence_length": 64})


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one undisturbed process makes of the large corpus: one unit after the other."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_large(folder)
    end(run_stage(folder, "--workers", "1"))
    found = outs(folder)
    assert len([name for name in found if name.startswith("train-")]) > 2
    assert TokenShards.open(folder / "data/tokens", "train").num_documents == 667
    return found


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_any_number_of_workers_gives_the_same_bytes(
    large: Path, everything: dict[str, bytes], workers: int
) -> None:
    end(run_stage(large, "--workers", str(workers)))
    assert outs(large) == everything


def test_units_and_parts_of_any_size_give_the_same_bytes(
    large: Path, everything: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(large)
    assert main(["--workers", "1"]) == 0  # one unit, one part
    assert outs(large) == everything


def test_shards_of_other_machines_are_merged(
    large: Path, everything: dict[str, bytes], tmp_path: Path
) -> None:
    machines = []
    for number in (1, 2, 3, 4):
        machine = tmp_path / f"machine{number}"
        machine.mkdir()
        write_large(machine)
        for path in machine.iterdir():
            os.utime(path)  # a copy has other times
        machines.append((machine, run_stage(machine, "--shard", f"{number}/4", "--workers", "1")))
    for machine, process in machines[:2] + machines[3:]:
        assert "documents in" in end(process)
        assert not (machine / "data").exists()
        shutil.copytree(machine / ".work", large / ".work", dirs_exist_ok=True)
    end(machines[2][1])  # its parts never arrive
    output = end(run_stage(large, "--workers", "2"))
    assert re.search(r"\d+ of \d+ units were encoded before", output)
    assert "learning merges" not in output
    assert outs(large) == everything
    assert not list(large.glob(".work/tokenize/shard-*/*/*.safetensors"))


def test_more_shards_than_units(large: Path, everything: dict[str, bytes]) -> None:
    output = end(run_stage(large, "--shard", "99/100"))
    assert "shard 99 of 100: 0 documents in 0 of" in output or "documents in 1 of" in output


def stopped(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """A run that holds its work folder and is stopped there for now."""
    process = run_stage(folder, *arguments, "--workers", "1")
    # Learning the merges still lies before it.
    wait_until(
        process, lambda: any(lock.stat().st_size > 0 for lock in folder.glob(".work/tokenize/*/*/lock"))
    )
    os.killpg(process.pid, signal.SIGSTOP)
    return process


def says(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def test_who_merges_waits_for_a_shard_that_is_encoded_now(large: Path, everything: dict[str, bytes]) -> None:
    shard = stopped(large, "--shard", "1/2")
    merging = run_stage(large)
    line = says(merging)
    assert f"tokenize: process {shard.pid} on" in line and "(shard-1-of-2)" in line and "waiting" in line
    os.killpg(shard.pid, signal.SIGCONT)
    end(shard)
    output = end(merging)
    assert re.search(r"[1-9]\d* of \d+ units were encoded before", output)
    assert outs(large) == everything


def test_who_needs_the_same_tokens_waits_and_takes_them(large: Path, everything: dict[str, bytes]) -> None:
    first = stopped(large)
    second, impatient = run_stage(large), run_stage(large)
    for waiting in (second, impatient):
        line = says(waiting)
        assert f"tokenize: process {first.pid} on" in line and "waiting for it" in line
    impatient.terminate()
    _, errors = impatient.communicate(timeout=60)
    assert impatient.returncode == 75 and errors.startswith("tokenize: stopped by SIGTERM; nothing of")
    os.killpg(first.pid, signal.SIGCONT)
    assert "encoding" in end(first)
    output, errors = second.communicate(timeout=60)
    assert (second.returncode, errors) == (0, "")
    assert "encoding" not in output and "learning merges" not in output
    assert outs(large) == everything


def test_a_changed_file_of_the_same_size_is_tokenized_afresh(folder: Path) -> None:
    assert main([]) == 0
    before = outs(folder)
    assert main([]) == 0
    assert outs(folder) == before
    corpus = folder / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("quick", "thick"))
    assert main([]) == 0
    assert outs(folder)["train.safetensors"] != before["train.safetensors"]


def test_a_shard_of_files_that_changed_since_is_not_merged(folder: Path) -> None:
    corpus = folder / "corpus.jsonl"
    assert main(["--shard", "1/1"]) == 0
    corpus.write_text(corpus.read_text().replace("quick", "thick"))
    assert main([]) == 0
    found = outs(folder)
    assert main(["--fresh"]) == 0
    assert outs(folder) == found


def test_a_shard_s_tokenizer_is_not_used_after_the_merge(folder: Path) -> None:
    corpus = folder / "corpus.jsonl"
    assert main(["--shard", "1/1"]) == 0
    assert main([]) == 0
    corpus.write_text(corpus.read_text().replace("quick", "brick"))
    assert main([]) == 0
    found = outs(folder)
    assert main(["--fresh"]) == 0
    assert outs(folder) == found


def test_a_tokenizer_that_was_copied_half_is_learned_again(folder: Path) -> None:
    assert main(["--shard", "1/1"]) == 0
    (path,) = folder.glob(".work/tokenize/shard-1-of-1/*/tokenizer.json")
    path.write_text(path.read_text()[:100])
    assert main([]) == 0
    found = outs(folder)
    assert main(["--fresh"]) == 0
    assert outs(folder) == found


def test_a_complete_run_is_published_again_without_encoding(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DVC deletes the out before it runs the stage; a kill before its commit costs nothing."""
    assert main([]) == 0
    before = outs(folder)
    shutil.rmtree(folder / "data")
    capsys.readouterr()
    assert main([]) == 0
    assert outs(folder) == before
    assert "encoding" not in capsys.readouterr().out
    assert main(["--fresh"]) == 0
    assert outs(folder) == before
    assert "encoding" in capsys.readouterr().out


@pytest.mark.slow
def test_what_dvc_has_committed_is_made_again_when_forced(folder: Path) -> None:
    pipeline = {"stages": {"tokenize": {"cmd": "python -m stages.tokenize_data", "outs": ["data/tokens"]}}}
    (folder / "dvc.yaml").write_text(yaml.safe_dump(pipeline))
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DVC_NO_ANALYTICS": "1",
    }

    def dvc(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "dvc", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    dvc("init", "--no-scm")
    assert "encoding" in dvc("repro")
    before = outs(folder)
    lock = (folder / "dvc.lock").read_text()
    assert "encoding" in dvc("repro", "--force")
    assert outs(folder) == before
    # As where another process completes them while this one waits.
    (complete,) = folder.glob(".work/tokenize/all/*/complete/meta.json")
    os.utime(complete, (time.time() + 60,) * 2)
    assert "encoding" not in dvc("repro", "--force")
    os.utime(complete, (1e9, 1e9))
    # As after a kill between the stage's end and DVC's commit.
    (folder / "dvc.lock").unlink()
    assert "encoding" not in dvc("repro", "--force")
    assert outs(folder) == before
    assert (folder / "dvc.lock").read_text() == lock


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "0/4"], "'0/4' is not I/N with I from 1 to N"),
        (["--shard", "5/4"], "'5/4' is not I/N with I from 1 to N"),
        (["--shard", "a"], "'a' is not I/N"),
        (["--workers", "0"], "'0' is not a number of cores"),
    ],
)
def test_arguments_that_make_no_sense_are_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_counted_dataset_has_no_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = {"source": "hub", "dataset": "owner/name", "revision": "0" * 40, "max_documents": 9}
    write_params(folder, corpus=corpus)
    assert main(["--shard", "1/2"]) == 1
    assert "tokenize --shard 1/2: corpus.max_documents: only who reads all" in capsys.readouterr().err


def wait_until(process: "subprocess.Popen[str]", is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


WHEN: dict[str, Callable[[Path], bool]] = {
    "learning": lambda folder: any(folder.glob(".work/tokenize/all/*/lock")),
    "starting": lambda folder: any(folder.glob(".work/tokenize/all/*/complete.part")),
    "encoding": lambda folder: len(list(folder.glob(".work/tokenize/all/*/0*.safetensors"))) >= 6,
    "publishing": lambda folder: any(folder.glob(".work/tokenize/all/*/complete")),
}
FAST = [("encoding", "SIGTERM group"), ("encoding", "SIGKILL")]
SLOW = [
    ("learning", "SIGINT"),
    ("learning", "SIGKILL"),
    ("starting", "SIGTERM group"),
    ("encoding", "SIGINT"),
    ("encoding", "SIGINT group"),
    ("encoding", "SIGTERM"),
    ("publishing", "SIGTERM"),
    ("publishing", "SIGKILL"),
]


@pytest.mark.parametrize(
    ("when", "how"), [*FAST, *(pytest.param(*stop, marks=pytest.mark.slow) for stop in SLOW)]
)
def test_a_stopped_run_leaves_nothing_that_looks_whole_and_the_next_goes_on_to_the_same_bytes(
    large: Path, everything: dict[str, bytes], when: str, how: str
) -> None:
    process = run_stage(large, "--workers", "2")
    wait_until(process, lambda: WHEN[when](large))
    workers = children(process.pid)
    name, _, group = how.partition(" ")
    number = signal.Signals[name]
    if group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if process.returncode == 0:  # the signal came too late
        assert when == "publishing" and outs(large) == everything
    else:
        assert not (large / "data/tokens").exists()
        assert process.returncode == (-number if name == "SIGKILL" else 75)
        last_words = "nothing of data/tokens was written; `dvc repro` goes on from what is encoded"
        assert errors == ("" if name == "SIGKILL" else f"tokenize: stopped by {name}; {last_words}\n")
    wait_while(lambda: any(is_running(worker) for worker in workers))

    kept = len(list(large.glob(".work/tokenize/all/*/0*.safetensors")))
    output = end(run_stage(large, "--workers", "2"))
    if when == "encoding":
        assert kept >= 6 and re.search(r"[1-9]\d* of \d+ units were encoded before", output)
    assert outs(large) == everything
    assert [path.name for path in (large / "data").iterdir()] == ["tokens"]


def wait_while(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_again_and_again_at_any_moment(large: Path, everything: dict[str, bytes]) -> None:
    chance = random.Random(0)
    kills = 0
    for _ in range(12):
        process = run_stage(large, "--workers", chance.choice(["1", "2", "3"]))
        try:
            process.wait(chance.uniform(0.4, 2.5))
            shutil.rmtree(large / ".work/tokenize")  # a fast machine is through: from the start again
        except subprocess.TimeoutExpired:
            process.kill()
            kills += 1
        process.communicate()
    assert kills >= 3
    end(run_stage(large, "--workers", "2"))
    assert outs(large) == everything
