"""The tokens of one split: one token file or, past `tokenizer.shard_tokens`, several.

    train.safetensors                       all of it
    train-00001-of-00003.safetensors …      or its shards, in their order

No document lies in two shards. To a reader the shards are one stream of tokens and one list of documents;
where they are cut changes nothing that it sees.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from stages.data.token_files import TokenFile, TokenFileError, TokenFileWriter


class JoinedTokens:
    """The tokens of several files as one array that is never made."""

    def __init__(self, files: Sequence[TokenFile]):
        self._arrays = [file.tokens for file in files]
        self._ends = np.cumsum([len(array) for array in self._arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, window: slice) -> np.ndarray:
        """uint16 or uint32 [stop - start]: a view where one file has them all, else a copy."""
        start, stop, step = window.indices(len(self))
        if step != 1:
            raise ValueError(f"every {step}th token: only whole windows can be read")
        pieces = []
        shard = int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            first = int(self._ends[shard]) - len(self._arrays[shard])
            piece = self._arrays[shard][start - first : stop - first]
            pieces.append(piece)
            start, shard = start + len(piece), shard + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else self._arrays[0][:0]


class TokenShards:
    """A split, memory-mapped read-only: opening it reads only the headers of its files."""

    def __init__(self, path: Path, files: Sequence[TokenFile]):
        self.path = path
        """For messages: of the one file, or of the shards with a * for their numbers."""
        self.files = tuple(files)
        self.tokens = JoinedTokens(self.files)
        self._document_ends = np.cumsum([file.num_documents for file in self.files])
        self._token_ends = np.cumsum([len(file.tokens) for file in self.files])
        self._bases = [0, *self._token_ends[:-1].tolist()]

    @classmethod
    def open(cls, folder: Path, split: str) -> "TokenShards":
        """Map the files of a split.

        Raises:
            TokenFileError: there are none, one is missing or damaged, or they are of several runs.
        """
        shards = sorted(folder.glob(f"{split}-*-of-*.safetensors"))
        if not shards:
            file = TokenFile.open(folder / f"{split}.safetensors")
            return cls(file.path, [file])
        wanted = [_shard_path(folder, split, number, len(shards)) for number in range(len(shards))]
        if shards != wanted or (folder / f"{split}.safetensors").exists():
            raise TokenFileError(
                f"{folder}: the files of the {split} split are not one set ({len(shards)} files, the last is "
                f"{shards[-1].name}); tokenize again"
            )
        files = [TokenFile.open(path) for path in shards]
        if any(file.metadata != files[0].metadata for file in files):
            raise TokenFileError(f"{folder}: the files of the {split} split differ in kind; tokenize again")
        return cls(folder / f"{split}-*.safetensors", files)

    @classmethod
    def of(cls, tokens: "TokenFile | TokenShards") -> "TokenShards":
        """Itself, or a single file as the split that it is."""
        return tokens if isinstance(tokens, TokenShards) else cls(tokens.path, [tokens])

    @property
    def num_documents(self) -> int:
        return int(self._document_ends[-1])

    @property
    def vocab_size(self) -> int:
        """Every token is less than this."""
        return self.files[0].vocab_size

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [N+1] in memory: where each document starts in `tokens`, and where the last one ends.

        For a split whose documents are looked at one by one; else `document_span`, `document_starts`.
        """
        starts = [
            file.document_offsets[:-1] + base for file, base in zip(self.files, self._bases, strict=True)
        ]
        return np.concatenate([*starts, [len(self.tokens)]])

    @property
    def document_bytes(self) -> np.ndarray:
        """int64 [N] in memory: UTF-8 bytes of each document's text."""
        return np.concatenate([file.document_bytes for file in self.files])

    def document_span(self, index: int) -> tuple[int, int]:
        """Where document `index`, from 0, starts in `tokens` and where it ends."""
        shard = int(np.searchsorted(self._document_ends, index, "right"))
        file, base = self.files[shard], self._bases[shard]
        within = index - int(self._document_ends[shard]) + file.num_documents
        return base + int(file.document_offsets[within]), base + int(file.document_offsets[within + 1])

    def document_starts(self, first: int, last: int) -> np.ndarray:
        """int64: the tokens from `first` to `last` inclusive where a document starts, and the end of all."""
        found = []
        shard = int(np.searchsorted(self._token_ends, first, "left"))
        while shard < len(self.files) and self._bases[shard] <= last:
            file, base = self.files[shard], self._bases[shard]
            # The end of a file that is not the last is the start of the next, where it is found.
            offsets = file.document_offsets if file is self.files[-1] else file.document_offsets[:-1]
            low = np.searchsorted(offsets, first - base, "left")
            high = np.searchsorted(offsets, last - base, "right")
            found.append(offsets[low:high] + base)
            shard += 1
        return np.concatenate(found) if found else np.empty(0, np.int64)


class TokenShardsWriter:
    """Writes a split, as a context manager; its files have their names once the block ends well."""

    def __init__(
        self, folder: Path, *, split: str, vocab_size: int, tokenizer_sha256: str, shard_tokens: int
    ):
        self.num_documents = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._vocab_size, self._tokenizer_sha256 = vocab_size, tokenizer_sha256
        self._paths: list[Path] = []
        self._writer: TokenFileWriter | None = None

    def __enter__(self) -> Self:
        self._begin_file()
        return self

    def append_documents(self, tokens: np.ndarray, lengths: np.ndarray, num_bytes: np.ndarray) -> None:
        """Add documents that stand one after the other in `tokens`; as TokenFileWriter."""
        ends = np.cumsum(lengths)
        document, token = 0, 0
        while document < len(lengths):
            assert self._writer is not None
            room = self._shard_tokens - self._writer.num_tokens
            last = int(np.searchsorted(ends, token + room, "right"))
            if last <= document:  # not even one more
                if self._writer.num_documents > 0:
                    self._end_file(None)
                    self._begin_file()
                    continue
                last = document + 1  # a document longer than a shard has one of its own
            taken = slice(document, last)
            self._writer.append_documents(
                tokens[token : int(ends[last - 1])], lengths[taken], num_bytes[taken]
            )
            document, token = last, int(ends[last - 1])
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)
        self.num_bytes += int(num_bytes.sum())

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_file(error)
        if error_type is not None:
            for path in self._paths:
                path.unlink(missing_ok=True)
            return
        if len(self._paths) == 1:
            self._paths[0].rename(self._folder / f"{self._split}.safetensors")
            return
        for number, path in enumerate(self._paths):
            path.rename(_shard_path(self._folder, self._split, number, len(self._paths)))

    def _begin_file(self) -> None:
        path = self._folder / f".{self._split}-{len(self._paths):05d}"
        self._paths.append(path)
        self._writer = TokenFileWriter(
            path, split=self._split, vocab_size=self._vocab_size, tokenizer_sha256=self._tokenizer_sha256
        ).__enter__()

    def _end_file(self, error: BaseException | None) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:  # None: ending one file, or beginning the next, has failed
            writer.__exit__(type(error) if error else None, error, None)


def _shard_path(folder: Path, split: str, number: int, count: int) -> Path:
    return folder / f"{split}-{number + 1:05d}-of-{count:05d}.safetensors"
