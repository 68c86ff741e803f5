"""Token files: the documents of one split as token ids, on disk and memory-mapped.

A token file is a safetensors file (https://huggingface.co/docs/safetensors: u64 little-endian header
length, JSON header, tensors) with three tensors, N being the number of documents:

    document_offsets  I64 [N+1]     document i is tokens[offsets[i] : offsets[i+1]]
    document_bytes    I64 [N]       UTF-8 bytes of each document's text
    tokens            U16 or U32    U16 where the vocabulary has at most 65,536 ids

We write the header ourselves: safetensors' own writer needs all tensors in memory and does not fix
the order of its metadata.
"""

import json
import math
import os
import shutil
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

FORMAT = "frugal tokens"
VERSION = "1"

_DTYPES: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8")}
_MAX_HEADER_BYTES = 2**20
_BUFFER_BYTES = 2**20


class TokenFileError(ValueError):
    """The file is no whole token file; one sentence says why."""


@dataclass(frozen=True)
class TokenFile:
    """A token file, memory-mapped read-only: opening it reads only the header."""

    path: Path
    tokens: np.ndarray
    """uint16 or uint32 [number of tokens]."""
    document_offsets: np.ndarray
    """int64 [N+1]: where each document starts in `tokens`, and where the last one ends."""
    document_bytes: np.ndarray
    """int64 [N]: UTF-8 bytes of each document's text, [BOT] and [EOT] not counted."""
    metadata: dict[str, str]
    """format, version, split, vocab_size, tokenizer_sha256."""

    @property
    def num_documents(self) -> int:
        return len(self.document_bytes)

    @property
    def vocab_size(self) -> int:
        """Every token is less than this."""
        return int(self.metadata["vocab_size"])

    @classmethod
    def open(cls, path: str | Path) -> "TokenFile":
        """Map a token file.

        Raises:
            TokenFileError: it is missing, truncated, or not a token file of this version.
        """
        path = Path(path)
        try:
            raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        except FileNotFoundError:
            raise TokenFileError(f"{path}: no such file; run the tokenize stage") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise TokenFileError(f"{path}: cannot be opened as a token file: {error}") from None
        header, data_start = _read_header(path, raw)
        metadata = _checked_metadata(path, header.pop("__metadata__", None))
        arrays = {
            name: _array(path, raw, data_start, name, header.get(name))
            for name in ("tokens", "document_offsets", "document_bytes")
        }
        end = data_start + sum(array.nbytes for array in arrays.values())
        if end != len(raw):
            raise TokenFileError(f"{path}: has {len(raw)} bytes where its header says {end}")
        offsets = arrays["document_offsets"]
        if len(offsets) != len(arrays["document_bytes"]) + 1 or offsets[-1] != len(arrays["tokens"]):
            raise TokenFileError(f"{path}: its document offsets do not fit its tokens; tokenize again")
        return cls(path=path, metadata=metadata, **arrays)


class TokenFileWriter:
    """Writes a token file document by document in constant memory, as a context manager.

    Until the `with` block ends well there is nothing under `path`; a process that dies leaves no half
    file that could be taken for a whole one.
    """

    def __init__(self, path: str | Path, *, split: str, vocab_size: int, tokenizer_sha256: str):
        self.path = Path(path)
        self.num_documents = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self._vocab_size = vocab_size
        self._token_dtype = "U16" if vocab_size <= 2**16 else "U32"
        self.metadata = {
            "format": FORMAT,
            "version": VERSION,
            "split": split,
            "vocab_size": str(vocab_size),
            "tokenizer_sha256": tokenizer_sha256,
        }
        """May be added to until the block ends."""

    def __enter__(self) -> Self:
        # The header comes first in the file and needs the counts, so the tensors are spooled beside
        # it, in files without a name: the system removes them even after kill -9.
        self._tokens, self._offsets, self._bytes = (self._spool() for _ in range(3))
        self._offsets.write(struct.pack("<q", 0))
        return self

    def append(self, tokens: np.ndarray, num_bytes: int) -> None:
        """Add one document: its token ids, [BOT] and [EOT] included, and its text's UTF-8 bytes."""
        self.append_documents(tokens, np.array([len(tokens)]), np.array([num_bytes]))

    def append_documents(self, tokens: np.ndarray, lengths: np.ndarray, num_bytes: np.ndarray) -> None:
        """Add documents that stand one after the other in `tokens`; of small ones many at a time, for a
        call costs more than encoding a line of text.

        Args:
            tokens: of any integer type.
            lengths: tokens of each document; their sum is len(tokens).
            num_bytes: UTF-8 bytes of each document's text.
        """
        if len(lengths) == 0:
            return
        if int(lengths.min()) == 0 or int(tokens.max()) >= self._vocab_size:
            raise ValueError(f"a document needs tokens, each less than vocab_size {self._vocab_size}")
        ends = self.num_tokens + np.cumsum(lengths, dtype=np.int64)
        if ends[-1] - self.num_tokens != len(tokens) or len(num_bytes) != len(lengths):
            raise ValueError(f"lengths of {ends[-1] - self.num_tokens} tokens for {len(tokens)}")
        self._tokens.write(tokens.astype(_DTYPES[self._token_dtype]).data)
        self._offsets.write(ends.astype("<i8").data)
        self._bytes.write(num_bytes.astype("<i8").data)
        self.num_documents += len(lengths)
        self.num_tokens = int(ends[-1])
        self.num_bytes += int(num_bytes.sum())

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._tokens, self._offsets, self._bytes:
            if error_type is None:
                self._assemble()

    def _spool(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self.path.parent, buffering=_BUFFER_BYTES)

    def _assemble(self) -> None:
        # int64 first, so that every tensor starts at a multiple of its item size.
        parts = {
            "document_offsets": ("I64", self.num_documents + 1, self._offsets),
            "document_bytes": ("I64", self.num_documents, self._bytes),
            "tokens": (self._token_dtype, self.num_tokens, self._tokens),
        }
        header: dict[str, Any] = {"__metadata__": self.metadata}
        end = 0
        for name, (dtype, length, _) in parts.items():
            start, end = end, end + length * _DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": [length], "data_offsets": [start, end]}
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        text = text.ljust(math.ceil(len(text) / 8) * 8)

        partial = self.path.with_name(f".{self.path.name}.partial")
        try:
            with partial.open("wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                for _, _, spool in parts.values():
                    spool.seek(0)
                    shutil.copyfileobj(spool, file, _BUFFER_BYTES)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)


def _read_header(path: Path, raw: np.ndarray) -> tuple[dict[str, Any], int]:
    foreign = TokenFileError(f"{path}: not a token file; the tokenize stage writes them")
    if len(raw) < 8:
        raise foreign
    (length,) = struct.unpack("<Q", raw[:8].tobytes())
    if length > _MAX_HEADER_BYTES:
        raise foreign
    if 8 + length > len(raw):
        raise TokenFileError(f"{path}: is cut off inside its header; tokenize again")
    try:
        header = json.loads(raw[8 : 8 + length].tobytes())
    except ValueError:
        raise foreign from None
    if not isinstance(header, dict):
        raise foreign
    return header, 8 + length


def _checked_metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise TokenFileError(f"{path}: a safetensors file, but not of tokens")
    if metadata.get("version") != VERSION or not str(metadata.get("vocab_size")).isdigit():
        raise TokenFileError(
            f"{path}: token file version {metadata.get('version')}, this program reads {VERSION}; "
            "tokenize again"
        )
    return metadata


def _array(path: Path, raw: np.ndarray, data_start: int, name: str, entry: Any) -> np.ndarray:
    try:
        dtype = _DTYPES[entry["dtype"]]
        (length,) = entry["shape"]
        start, end = (data_start + int(offset) for offset in entry["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise TokenFileError(f"{path}: its header has no usable entry for {name!r}; tokenize again") from None
    if (dtype == _DTYPES["I64"]) != (name != "tokens") or end - start != length * dtype.itemsize:
        raise TokenFileError(f"{path}: its header has no usable entry for {name!r}; tokenize again")
    if not data_start <= start <= end <= len(raw):
        raise TokenFileError(f"{path}: is cut off: {name!r} ends at byte {end} of {len(raw)}; tokenize again")
    return raw[start:end].view(dtype)
