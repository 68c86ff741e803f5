"""Parts of files: read one by one they are the file, wherever they are cut."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.data import sources
from stages.data.documents import CorpusError
from stages.data.file_parts import file_parts
from stages.data.sources import corpus_units, iterate_documents, iterate_unit_texts
from stages.data.text_files import iterate_file_texts
from stages.params import EmbeddedCorpus, FilesCorpus, HubCorpus


def files(folder: Path, *names: str) -> FilesCorpus:
    paths = [str(folder / name) for name in names]
    return FilesCorpus.model_validate({"source": "files", "paths": paths, "validation_every": 2})


texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=12)


@settings(max_examples=100, deadline=None)
@given(rows=texts, part_bytes=st.integers(1, 200), blank=st.booleans(), ends=st.booleans())
def test_json_lines_are_cut_between_lines(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], part_bytes: int, blank: bool, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("t") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in rows]
    path.write_text(("\n\n" if blank else "\n").join(lines) + ("\n" if ends else ""), newline="")
    corpus = files(path.parent, "a.jsonl")
    parts = list(file_parts(path, "text", part_bytes))
    assert sum(part.num_bytes for part in parts) == path.stat().st_size
    assert all(part.num_bytes <= part_bytes for part in parts)
    assert list(iterate_file_texts(parts, corpus)) == rows
    one_by_one = [text for part in parts for text in iterate_file_texts([part], corpus)]
    assert one_by_one == rows


@pytest.mark.parametrize("part_bytes", [1, 40, 100, 10**6])
def test_an_error_in_a_later_part_names_the_line_of_the_file(tmp_path: Path, part_bytes: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n{"text": "two"}\n' * 4 + b'{"text": "\xc3\xa9"}\n{"text": 5}\n')
    parts = list(file_parts(path, "text", part_bytes))
    assert (len(parts) == 1) == (part_bytes == 10**6)
    with pytest.raises(CorpusError, match=r"a\.jsonl:14: 'text' holds int"):
        for part in parts:
            list(iterate_file_texts([part], files(tmp_path, "a.jsonl")))


@settings(max_examples=40, deadline=None)
@given(rows=texts, rows_per_group=st.integers(1, 5), part_bytes=st.integers(1, 400))
def test_parquet_is_cut_between_row_groups(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], rows_per_group: int, part_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("t") / "a.parquet"
    table = pyarrow.table({"n": range(len(rows)), "text": pyarrow.array(rows, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=rows_per_group)
    parts = list(file_parts(path, "text", part_bytes))
    assert [
        text for part in parts for text in iterate_file_texts([part], files(path.parent, "a.parquet"))
    ] == rows
    groups = -(-len(rows) // rows_per_group)
    if part_bytes == 1 and rows:
        assert len(parts) == groups


def test_an_error_in_a_later_row_group_names_the_row_of_the_file(tmp_path: Path) -> None:
    rows = pyarrow.array([b"good", b"good", b"good", b"bad \xff"], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet", row_group_size=1)
    *_, last = file_parts(tmp_path / "a.parquet", "text", 1)
    with pytest.raises(CorpusError, match=r"a\.parquet, row 3: not UTF-8 at byte 4"):
        list(iterate_file_texts([last], files(tmp_path, "a.parquet")))


def test_what_can_be_read_only_from_its_start_is_one_part(tmp_path: Path) -> None:
    for name, content in (("a.txt", b"x" * 99), ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99))):
        (tmp_path / name).write_bytes(content)
        (part,) = file_parts(tmp_path / name, "text", 1)
        assert part.end is None


def test_a_large_file_that_is_no_parquet_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(CorpusError, match=r"a\.parquet: cannot be read as parquet"):
        list(file_parts(tmp_path / "a.parquet", "text", 1))


def mixed_corpus(folder: Path) -> FilesCorpus:
    """Every kind, with rows without text."""
    rows = [f"row {i} é" for i in range(40)]
    for number in range(7):
        (folder / f"{number}.txt").write_text(f"file {number}")
    (folder / "empty.txt").write_text("")
    lines = "".join(json.dumps({"text": row if len(row) % 3 else None}) + "\n" for row in rows)
    (folder / "r.jsonl").write_text(lines)
    (folder / "s.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pyarrow.table({"text": pyarrow.array([*rows, None, ""])})
    pyarrow.parquet.write_table(table, folder / "t.parquet", row_group_size=6)
    return files(folder, "*")


@pytest.mark.parametrize("unit_bytes", [1, 30, 100, 1000, 2**25])
def test_units_one_after_the_other_are_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int
) -> None:
    monkeypatch.setattr(sources, "UNIT_BYTES", unit_bytes)
    corpus = mixed_corpus(tmp_path)
    units = corpus_units(corpus)
    assert [unit.number for unit in units] == list(range(len(units)))
    assert (len(units) == 1) == (unit_bytes == 2**25)
    found = [text for unit in units for text in iterate_unit_texts(corpus, unit)]
    assert found == [document.text for document in iterate_documents(corpus)]


def test_the_embedded_corpus_is_one_unit() -> None:
    corpus = EmbeddedCorpus(source="embedded")
    (unit,) = corpus_units(corpus)
    found = list(iterate_unit_texts(corpus, unit))
    assert found == [document.text for document in iterate_documents(corpus)]


@pytest.mark.parametrize(("settings", "units"), [({}, 3), ({"max_documents": 5}, 1)])
def test_the_files_of_a_dataset_are_units_unless_documents_are_counted(
    tmp_path: Path, settings: dict[str, Any], units: int
) -> None:
    for number in range(3):
        table = pyarrow.table({"text": [f"document {number} {row}" for row in range(4)] + [None]})
        pyarrow.parquet.write_table(table, tmp_path / f"train-{number:05d}-of-00003.parquet")
    corpus = HubCorpus.model_validate(
        {"source": "hub", "dataset": str(tmp_path), "revision": "0" * 40, "validation_every": 2} | settings
    )
    found = corpus_units(corpus)
    assert len(found) == units
    documents = [document.text for document in iterate_documents(corpus)]
    assert [text for unit in found for text in iterate_unit_texts(corpus, unit)] == documents
    assert len(documents) == settings.get("max_documents", 12)
