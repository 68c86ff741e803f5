"""Which local files a corpus is, and the parts of them that can be read without what stands before."""

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.data.documents import CorpusError

_ALLOWED = ".txt, .jsonl or .parquet (.txt and .jsonl also as .gz or .zst)"
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True, slots=True)
class FilePart:
    """Consecutive documents of one file: all of them, or those that begin in a range of it."""

    path: Path
    num_bytes: int
    """On disk; of a part of a parquet file those of its text column."""
    start: int = 0
    """The first byte of a .jsonl file, the first row group of a .parquet file."""
    end: int | None = None
    """One past the last byte or row group; None is the end of the file."""


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
        kind_of(path)
    return paths


def kind_of(path: Path) -> tuple[str, str | None]:
    """`.jsonl.gz` as (".jsonl", "gzip").

    Raises:
        CorpusError: a file of this name cannot be read.
    """
    compression = _COMPRESSIONS.get(path.suffix)
    kind = Path(path.stem).suffix if compression else path.suffix
    if kind not in (".txt", ".jsonl", ".parquet") or (kind == ".parquet" and compression):
        raise CorpusError(f"corpus.paths: {path} is none of {_ALLOWED}; narrow the pattern")
    return kind, compression


def text_bytes_of_files(patterns: tuple[str, ...]) -> int | None:
    """Bytes of text where the sizes of the files tell: plain .txt alone, else None."""
    paths = find_files(patterns)
    if any(path.suffix != ".txt" for path in paths):
        return None
    return sum(path.stat().st_size for path in paths)


def file_parts(path: Path, text_column: str, part_bytes: int) -> Iterator[FilePart]:
    """The file in parts of about `part_bytes`; whole where it is small, or can only be read from its start.

    Raises:
        CorpusError: it is a large parquet file and no such.
        OSError: there is no file.
    """
    kind, compression = kind_of(path)
    size = path.stat().st_size
    if size <= part_bytes or kind == ".txt" or compression:
        yield FilePart(path, size)
    elif kind == ".jsonl":
        for start in range(0, size, part_bytes):
            end = min(start + part_bytes, size)
            yield FilePart(path, end - start, start, end)
    else:
        yield from _row_groups(path, text_column, part_bytes)


def _row_groups(path: Path, text_column: str, part_bytes: int) -> Iterator[FilePart]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            start, num_bytes = 0, 0
            for group in range(file.num_row_groups):
                metadata = file.metadata.row_group(group)
                columns = (metadata.column(number) for number in range(metadata.num_columns))
                num_bytes += sum(
                    column.total_compressed_size for column in columns if column.path_in_schema == text_column
                )
                if num_bytes >= part_bytes or group == file.num_row_groups - 1:
                    yield FilePart(path, num_bytes, start, group + 1)
                    start, num_bytes = group + 1, 0
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{path}: cannot be read as parquet: {error}") from error
