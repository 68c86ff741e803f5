"""Sequences of fixed length from a token file, and the micro-batches made of them.

Shapes: B sequences in a micro-batch, S tokens in a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from stages.data.special_tokens import PAD_ID
from stages.data.token_files import TokenFile

IGNORE_INDEX = -100
"""A target that no loss is computed for; the default of torch's cross-entropy."""

FILLER = -1
"""The index of a row that is no sequence: all padding, nothing to predict."""


class SequencesError(ValueError):
    """The token file is too small for one sequence."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass takes; made on the CPU."""

    input_ids_BS: torch.Tensor
    """int64 [B, S]."""
    targets_BS: torch.Tensor
    """int64 [B, S]: the token after each input token, or IGNORE_INDEX."""
    cu_seqlens: torch.Tensor | None
    """int32 [segments + 1]: where attention must not look back, counted in the B*S tokens row after
    row: 0, every row start, every document start inside a row, B*S. A segment is never longer than
    S. None for padded sequences, whose causal attention needs no more."""
    target_tokens: int
    """Targets that are not IGNORE_INDEX."""
    input_tokens: int
    """Tokens that are not padding."""


class PackedSequences:
    """Documents one after the other, cut every S tokens.

    Sequence i is tokens[i*S : (i+1)*S] and its targets are the tokens one further. The last token of
    a document has no target: a document's end says nothing about which document follows.
    """

    def __init__(self, token_file: TokenFile, sequence_length: int):
        self._tokens = token_file.tokens
        self._document_offsets = token_file.document_offsets
        self.sequence_length = sequence_length
        self._length = max(0, len(self._tokens) - 1) // sequence_length
        if self._length == 0:
            raise SequencesError(
                f"{token_file.path}: its {len(self._tokens)} tokens make no sequence of "
                f"training.sequence_length {sequence_length} and a target; use a larger corpus or lower it"
            )

    def __len__(self) -> int:
        return self._length

    def micro_batch(self, indices: Sequence[int] | np.ndarray) -> MicroBatch:
        """The sequences of these indices, FILLER (-1) rows included, one row each.

        Raises:
            IndexError: an index is neither FILLER nor a sequence.
        """
        rows = _checked(indices, len(self))
        S = self.sequence_length
        input_ids_BS = np.full((len(rows), S), PAD_ID, np.int64)
        targets_BS = np.full((len(rows), S), IGNORE_INDEX, np.int64)
        boundaries: list[np.ndarray] = []
        for row, index in enumerate(rows):
            boundaries.append(np.array([row * S]))
            if index == FILLER:
                continue
            start = int(index) * S
            window = self._tokens[start : start + S + 1]
            input_ids_BS[row] = window[:-1]
            targets_BS[row] = window[1:]
            document_starts = self._document_starts(start + 1, start + S) - start
            targets_BS[row, document_starts - 1] = IGNORE_INDEX
            boundaries.append(row * S + document_starts[document_starts < S])
        boundaries.append(np.array([len(rows) * S]))
        return _as_micro_batch(
            input_ids_BS,
            targets_BS,
            torch.from_numpy(np.concatenate(boundaries).astype(np.int32)),
            input_tokens=int((rows != FILLER).sum()) * S,
        )

    def _document_starts(self, first: int, last: int) -> np.ndarray:
        """Where documents start, from `first` to `last` inclusive."""
        offsets = self._document_offsets
        return offsets[np.searchsorted(offsets, first, "left") : np.searchsorted(offsets, last, "right")]


class PaddedSequences:
    """One document per sequence, cut to S inputs or filled up with [PAD].

    What a document has beyond S + 1 tokens is not trained on.
    """

    def __init__(self, token_file: TokenFile, sequence_length: int):
        self._tokens = token_file.tokens
        self._document_offsets = token_file.document_offsets
        self.sequence_length = sequence_length
        self._length = token_file.num_documents
        if self._length == 0:
            raise SequencesError(f"{token_file.path}: holds no document")

    def __len__(self) -> int:
        return self._length

    def micro_batch(self, indices: Sequence[int] | np.ndarray) -> MicroBatch:
        """The documents of these indices, FILLER (-1) rows included, one row each.

        Raises:
            IndexError: an index is neither FILLER nor a document.
        """
        rows = _checked(indices, len(self))
        S = self.sequence_length
        input_ids_BS = np.full((len(rows), S), PAD_ID, np.int64)
        targets_BS = np.full((len(rows), S), IGNORE_INDEX, np.int64)
        input_tokens = 0
        for row, index in enumerate(rows):
            if index == FILLER:
                continue
            start, end = self._document_offsets[index : index + 2]
            window = self._tokens[start : min(int(end), int(start) + S + 1)]
            length = len(window) - 1
            input_ids_BS[row, :length] = window[:-1]
            targets_BS[row, :length] = window[1:]
            input_tokens += length
        return _as_micro_batch(input_ids_BS, targets_BS, None, input_tokens)


def make_sequences(
    token_file: TokenFile, sequences: Literal["packed", "padded"], sequence_length: int
) -> PackedSequences | PaddedSequences:
    """The sequences that `training.sequences` names.

    Raises:
        SequencesError: the file is too small for one.
    """
    if sequences == "packed":
        return PackedSequences(token_file, sequence_length)
    return PaddedSequences(token_file, sequence_length)


def _checked(indices: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
    rows = np.asarray(indices, np.int64)
    wrong = rows[(rows >= length) | (rows < FILLER)]
    if len(wrong):
        raise IndexError(f"no sequence {wrong[0]}; there are {length}")
    return rows


def _as_micro_batch(
    input_ids_BS: np.ndarray, targets_BS: np.ndarray, cu_seqlens: torch.Tensor | None, input_tokens: int
) -> MicroBatch:
    return MicroBatch(
        input_ids_BS=torch.from_numpy(input_ids_BS),
        targets_BS=torch.from_numpy(targets_BS),
        cu_seqlens=cu_seqlens,
        target_tokens=int((targets_BS != IGNORE_INDEX).sum()),
        input_tokens=input_tokens,
    )
