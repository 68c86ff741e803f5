"""From the parts of all units to the splits: which split a document is in follows from those before it."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from stages.data.documents import Split
from stages.data.special_tokens import BOT_ID
from stages.data.token_files import TokenFile
from stages.data.token_shards import TokenShardsWriter

SPLITS: tuple[Split, ...] = ("train", "validation")

_TOKENS_AT_A_TIME = 2**18


class DamagedPartError(RuntimeError):
    """A part does not hold the text that it was made from."""


class Merger:
    """Takes the parts in the order of the corpus and writes the splits, as a context manager.

    Every token is decoded again: the SHA-256 of each split is that of the text which its tokens stand for,
    and each part is held against the SHA-256 of the text that it was made from.
    """

    def __init__(
        self,
        folder: Path,
        token_bytes: list[bytes],
        *,
        validation_every: int,
        vocab_size: int,
        tokenizer_sha256: str,
        shard_tokens: int,
    ):
        # An array of Python's objects, from which numpy takes many at a time.
        self._token_bytes = np.array([*token_bytes, None], object)[:-1]
        self._token_lengths = np.array([len(of_token) for of_token in token_bytes], np.int64)
        self._validation_every = validation_every
        self._tokenizer_sha256 = tokenizer_sha256
        self._sha256 = {split: hashlib.sha256() for split in SPLITS}
        self._stack = ExitStack()
        self.num_documents = 0
        self.splits = {
            split: TokenShardsWriter(
                folder,
                split=split,
                vocab_size=vocab_size,
                tokenizer_sha256=tokenizer_sha256,
                shard_tokens=shard_tokens,
            )
            for split in SPLITS
        }

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for writer in self.splits.values():
                stack.enter_context(writer)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(error_type, error, traceback)

    def add(self, part: TokenFile) -> None:
        """Add the documents of a part.

        Raises:
            DamagedPartError: its tokens are not those of its text.
        """
        text_sha256 = hashlib.sha256()
        if part.metadata["tokenizer_sha256"] != self._tokenizer_sha256:
            raise _damaged(part, "was encoded with another tokenizer")
        for first, last in _blocks(part.document_offsets):
            offsets = part.document_offsets[first : last + 1]
            tokens, num_bytes = part.tokens[offsets[0] : offsets[-1]], part.document_bytes[first:last]
            # What the hash does not see: where documents begin, and how many bytes each has.
            starts = (offsets[:-1] - offsets[0]).astype(np.int64)
            if not np.array_equal(np.flatnonzero(tokens == BOT_ID), starts):
                raise _damaged(part, "a document does not begin where it says")
            text = self._decode(part, tokens)
            text_sha256.update(text)
            if not np.array_equal(np.add.reduceat(self._token_lengths[tokens], starts), num_bytes):
                raise _damaged(part, "its tokens are not those of the text it was made from")
            self._add_documents(tokens, np.diff(offsets), num_bytes, memoryview(text))
        if text_sha256.hexdigest() != part.metadata["text_sha256"]:
            raise _damaged(part, "its tokens are not those of the text it was made from")

    def text_sha256(self, split: Split) -> str:
        """Of the texts of the split's documents, one after the other, in UTF-8."""
        return self._sha256[split].hexdigest()

    def _decode(self, part: TokenFile, tokens: np.ndarray) -> bytes:
        if int(tokens.max()) >= len(self._token_bytes):
            raise _damaged(part, "has a token that is not in the vocabulary")
        return b"".join(self._token_bytes[tokens].tolist())

    def _add_documents(
        self, tokens: np.ndarray, lengths: np.ndarray, num_bytes: np.ndarray, text: memoryview
    ) -> None:
        documents, ends = len(lengths), np.cumsum(num_bytes)
        every = self._validation_every
        is_validation = np.arange(self.num_documents, self.num_documents + documents) % every == every - 1
        self.num_documents += documents

        start = 0
        for document in np.flatnonzero(is_validation).tolist():
            end = int(ends[document])
            before = end - int(num_bytes[document])
            self._sha256["train"].update(text[start:before])
            self._sha256["validation"].update(text[before:end])
            start = end
        self._sha256["train"].update(text[start : int(num_bytes.sum())])

        for split, is_in in zip(SPLITS, (~is_validation, is_validation), strict=True):
            chosen = tokens[np.repeat(is_in, lengths)]
            self.splits[split].append_documents(chosen, lengths[is_in], num_bytes[is_in])


def _damaged(part: TokenFile, how: str) -> DamagedPartError:
    return DamagedPartError(f"{part.path}: {how}; delete it and run again: the others are kept")


def _blocks(offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of documents of bounded size, or of one document."""
    first, documents = 0, len(offsets) - 1
    while first < documents:
        last = int(np.searchsorted(offsets, offsets[first] + _TOKENS_AT_A_TIME, "right")) - 1
        last = max(last, first + 1)
        yield first, last
        first = last
