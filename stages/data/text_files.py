"""Documents from local files: .txt, .jsonl and .parquet; .gz and .zst of the first two."""

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stages.data.documents import CorpusError, without_lone_surrogates
from stages.data.file_parts import FilePart, kind_of
from stages.params import FilesCorpus

_ROWS_PER_BATCH = 256  # a whole row group at a time would hold hundreds of MB
_READ_BYTES = 2**20


def iterate_file_texts(parts: Iterable[FilePart], corpus: FilesCorpus) -> Iterator[str]:
    """The text of every document of these parts of files, part by part.

    Memory does not grow with the number of documents or rows; one document is held at a time.

    Raises:
        CorpusError: a file is missing, damaged, of another kind, not UTF-8, or lacks the column.
    """
    for part in parts:
        kind, compression = kind_of(part.path)
        try:
            if kind == ".parquet":
                yield from _parquet_texts(part, corpus)
            else:
                with _open_bytes(part.path, compression) as file:
                    yield from (_plain_text if kind == ".txt" else _json_lines)(file, part, corpus)
        except OSError as error:
            raise CorpusError(f"{part.path}: cannot be read: {error}") from error


def _open_bytes(path: Path, compression: str | None) -> BinaryIO:
    if compression is None:
        return path.open("rb")
    # pyarrow's reader goes on after the first of several concatenated frames and raises at a
    # truncated one; zstandard's own stream reader does neither.
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=compression))


def _plain_text(file: BinaryIO, part: FilePart, corpus: FilesCorpus) -> Iterator[str]:
    yield _decode(file.read(), str(part.path), 0, corpus).removeprefix("\ufeff")


def _json_lines(file: BinaryIO, part: FilePart, corpus: FilesCorpus) -> Iterator[str]:
    """The lines that begin in the part; the last of them may end beyond it."""
    offset = part.start
    if offset > 0:
        file.seek(offset - 1)
        offset += len(file.readline()) - 1
    for number, line in enumerate(file):
        if part.end is not None and offset >= part.end:
            return
        text = _decode(line, str(part.path), offset, corpus).removeprefix("\ufeff").strip()
        offset += len(line)
        if not text:
            continue
        place = _Line(part, number)
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"{place}: not JSON ({error}); a .jsonl file holds one JSON object a line"
            ) from None
        if not isinstance(row, dict):
            raise CorpusError(
                f"{place}: holds a JSON {type(row).__name__}; each line of a .jsonl file must "
                f"be an object with the field {corpus.text_column!r}"
            )
        if corpus.text_column not in row:
            raise no_such_column(place, corpus.text_column, list(row))
        yield _checked_text(row[corpus.text_column], place, corpus)


@dataclass(frozen=True, slots=True)
class _Line:
    """`path:line`; counted only when it is to be said, for that reads the file up to the part."""

    part: FilePart
    number: int
    """From 0, in the part."""

    def __str__(self) -> str:
        lines_before = 0
        if self.part.start > 0:
            with self.part.path.open("rb") as file:
                # The part begins after the first line end from start - 1 on.
                lines_before, left = 1, self.part.start - 1
                while chunk := file.read(min(left, _READ_BYTES)):
                    lines_before, left = lines_before + chunk.count(b"\n"), left - len(chunk)
        return f"{self.part.path}:{lines_before + self.number + 1}"


def _parquet_texts(part: FilePart, corpus: FilesCorpus) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    path, column = part.path, corpus.text_column
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BYTES) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise no_such_column(str(path), column, names)
            row = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
            groups = range(part.start, file.num_row_groups if part.end is None else part.end)
            for batch in file.iter_batches(_ROWS_PER_BATCH, groups, columns=[column], use_threads=False):
                values = batch.column(0)
                if isinstance(values, pyarrow.DictionaryArray):
                    values = values.dictionary_decode()
                if pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type):
                    # Parquet does not check that its strings are UTF-8; bytes let us do so.
                    values = values.cast(pyarrow.large_binary())
                for value in values.to_pylist():
                    place = f"{path}, row {row}"
                    if isinstance(value, bytes):
                        value = _decode(value, place, 0, corpus)
                    yield _checked_text(value, place, corpus)
                    row += 1
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{path}: cannot be read as parquet: {error}") from error


def _decode(data: bytes, place: str, offset: int, corpus: FilesCorpus) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if corpus.encoding_errors == "replace":
            return data.decode("utf-8", "replace")
        raise CorpusError(
            f"{place}: not UTF-8 at byte {offset + error.start} (0x{data[error.start]:02x}); convert the "
            "text to UTF-8, or set corpus.encoding_errors: replace"
        ) from None


def _checked_text(value: object, place: object, corpus: FilesCorpus) -> str:
    """The value of a row's text column; null is empty text.

    Raises:
        CorpusError: it is no string, or no text that UTF-8 can hold.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise CorpusError(
            f"{place}: {corpus.text_column!r} holds {type(value).__name__}, not text; "
            "set corpus.text_column to a column of strings"
        )
    return without_lone_surrogates(value, place, corpus.encoding_errors)


def no_such_column(place: object, column: str, existing: list[str]) -> CorpusError:
    choices = ", ".join(existing) or "(none)"
    return CorpusError(f"{place}: has no column {column!r}; set corpus.text_column to one of: {choices}")
