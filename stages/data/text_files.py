"""Documents from local files: .txt, .jsonl and .parquet; .gz and .zst of the first two."""

import glob
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stages.data.documents import CorpusError, without_lone_surrogates
from stages.params import FilesCorpus

_ALLOWED = ".txt, .jsonl or .parquet (.txt and .jsonl also as .gz or .zst)"
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_ROWS_PER_BATCH = 256  # a whole row group at a time would hold hundreds of MB


def iterate_file_texts(corpus: FilesCorpus) -> Iterator[str]:
    """The text of every document, file by file in the order of `find_files`.

    Memory does not grow with the number of documents or rows; one document is held at a time.

    Raises:
        CorpusError: a file is missing, damaged, of another kind, not UTF-8, or lacks the column.
    """
    for path in find_files(corpus.paths):
        kind, compression = _kind(path)
        try:
            if kind == ".parquet":
                yield from _parquet_texts(path, corpus)
            else:
                with _open_bytes(path, compression) as file:
                    yield from (_plain_text if kind == ".txt" else _json_lines)(file, path, corpus)
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error}") from error


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """Every file that a path or glob of `corpus.paths` names, once, sorted.

    Raises:
        CorpusError: a pattern names no file, or a file of a kind that cannot be read.
    """
    found: set[str] = set()
    for pattern in patterns:
        if Path(pattern).is_dir():
            raise CorpusError(
                f"corpus.paths: {pattern} is a folder; name its files, for example "
                f"{Path(pattern).as_posix()}/**/*.txt"
            )
        # A file whose name holds glob characters, such as a[1].txt, is meant as it is written.
        # Path.glob takes no absolute pattern.
        names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)  # noqa: PTH207
        files = {Path(name).as_posix() for name in names if Path(name).is_file()}
        if not files:
            raise CorpusError(
                f"corpus.paths: {pattern} names no file; check the path, which is relative to the "
                "folder of params.yaml"
            )
        found |= files
    paths = [Path(name) for name in sorted(found)]
    for path in paths:
        _kind(path)
    return paths


def text_bytes_of_files(patterns: tuple[str, ...]) -> int | None:
    """Bytes of text where the sizes of the files tell: plain .txt alone, else None."""
    paths = find_files(patterns)
    if any(path.suffix != ".txt" for path in paths):
        return None
    return sum(path.stat().st_size for path in paths)


def _kind(path: Path) -> tuple[str, str | None]:
    """`.jsonl.gz` as (".jsonl", "gzip")."""
    compression = _COMPRESSIONS.get(path.suffix)
    kind = Path(path.stem).suffix if compression else path.suffix
    if kind not in (".txt", ".jsonl", ".parquet") or (kind == ".parquet" and compression):
        raise CorpusError(f"corpus.paths: {path} is none of {_ALLOWED}; narrow the pattern")
    return kind, compression


def _open_bytes(path: Path, compression: str | None) -> BinaryIO:
    if compression is None:
        return path.open("rb")
    # pyarrow's reader goes on after the first of several concatenated frames and raises at a
    # truncated one; zstandard's own stream reader does neither.
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=compression))


def _plain_text(file: BinaryIO, path: Path, corpus: FilesCorpus) -> Iterator[str]:
    yield _decode(file.read(), str(path), 0, corpus).removeprefix("\ufeff")


def _json_lines(file: BinaryIO, path: Path, corpus: FilesCorpus) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(file, start=1):
        text = _decode(line, str(path), offset, corpus).removeprefix("\ufeff").strip()
        offset += len(line)
        if not text:
            continue
        try:
            row = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise CorpusError(
                f"{path}:{number}: not JSON ({error}); a .jsonl file holds one JSON object a line"
            ) from None
        if not isinstance(row, dict):
            raise CorpusError(
                f"{path}:{number}: holds a JSON {type(row).__name__}; each line of a .jsonl file must "
                f"be an object with the field {corpus.text_column!r}"
            )
        if corpus.text_column not in row:
            raise no_such_column(f"{path}:{number}", corpus.text_column, list(row))
        yield _checked_text(row[corpus.text_column], f"{path}:{number}", corpus)


def _parquet_texts(path: Path, corpus: FilesCorpus) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    column = corpus.text_column
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise no_such_column(str(path), column, names)
            row = 0
            for batch in file.iter_batches(_ROWS_PER_BATCH, columns=[column], use_threads=False):
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


def _checked_text(value: object, place: str, corpus: FilesCorpus) -> str:
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


def no_such_column(place: str, column: str, existing: list[str]) -> CorpusError:
    choices = ", ".join(existing) or "(none)"
    return CorpusError(f"{place}: has no column {column!r}; set corpus.text_column to one of: {choices}")
