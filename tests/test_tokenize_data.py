"""The tokenize stage: what it writes, that it is always the same, and that nothing half is left."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from stages.data.special_tokens import BOT_ID, EOT_ID
from stages.data.token_files import TokenFile
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


def run_stage(folder: Path, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "stages.tokenize_data"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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


def test_any_number_of_workers_gives_the_same_bytes(folder: Path) -> None:
    corpus = write_corpus(folder, DOCUMENTS * 30)
    results = []
    for workers in (1, 3):
        write_params(folder, corpus=corpus, tokenizer={"vocab_size": 300, "workers": workers})
        process = run_stage(folder)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        results.append(outs(folder))
    assert results[0] == results[1]


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


def part(folder: Path) -> Path:
    return folder / "data/.tokens.part"


WHEN: dict[str, Callable[[Path], bool]] = {
    "learning": lambda folder: part(folder).exists(),
    "encoding": lambda folder: (part(folder) / "tokenizer.json").exists(),
    "writing": lambda folder: any(part(folder).glob("*.safetensors")),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A folder whose corpus takes a second to tokenize, and what an undisturbed run makes of it."""
    folder = tmp_path_factory.mktemp("large")
    corpus = write_corpus(folder, [f"{i} {text}" for i in range(80) for text in DOCUMENTS])
    tokenizer = {"vocab_size": 300, "workers": 1}
    write_params(folder, corpus=corpus, tokenizer=tokenizer, training={"sequence_length": 64})
    process = run_stage(folder)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return folder, outs(folder)


FAST = {("learning", signal.SIGINT), ("encoding", signal.SIGTERM), ("writing", signal.SIGKILL)}


@pytest.mark.parametrize(
    ("when", "number"),
    [
        pytest.param(
            when,
            number,
            id=f"{when}-{number.name}",
            marks=() if (when, number) in FAST else pytest.mark.slow,
        )
        for when in WHEN
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
    ],
)
def test_a_stopped_run_leaves_nothing_that_looks_whole_and_the_next_gives_the_same_bytes(
    large: tuple[Path, dict[str, bytes]], when: str, number: signal.Signals
) -> None:
    folder, wanted = large
    shutil.rmtree(folder / "data")  # as DVC does before it runs the stage
    process = run_stage(folder)
    deadline = time.monotonic() + 60
    while not WHEN[when](folder):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if when == "writing" and (folder / "data/tokens").exists():  # the signal came too late
        assert outs(folder) == wanted
    elif number is signal.SIGKILL:
        assert process.returncode == -number
        assert [path.name for path in (folder / "data").iterdir()] == [".tokens.part"]
    else:
        assert process.returncode == 75
        last_words = "nothing of data/tokens was written; `dvc repro` runs it again"
        assert errors == f"tokenize: stopped by {number.name}; {last_words}\n"
        assert not list((folder / "data").iterdir())

    again = run_stage(folder)
    _, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert outs(folder) == wanted
    assert [path.name for path in (folder / "data").iterdir()] == ["tokens"]
