"""Sequences of fixed length from the tokens of a split, and the micro-batches made of them.

Shapes: B sequences in a micro-batch, S tokens in a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from stages.data.special_tokens import PAD_ID
from stages.data.token_files import TokenFile
from stages.data.token_shards import TokenShards

IGNORE_INDEX = -100
"""A target that no loss is computed for; the default of torch's cross-entropy."""

FILLER = -1
"""The index of a row that is no sequence: all padding, nothing to predict."""


class SequencesError(ValueError):
    """The split is too small for one sequence."""


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

    def __init__(self, split: TokenFile | TokenShards, sequence_length: int):
        self._split = TokenShards.of(split)
        self._tokens = self._split.tokens
        self.sequence_length = sequence_length
        self._length = max(0, len(self._tokens) - 1) // sequence_length
        if self._length == 0:
            raise SequencesError(
                f"{split.path}: its {len(self._tokens)} tokens make no sequence of "
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
            document_starts = self._split.document_starts(start + 1, start + S) - start
            targets_BS[row, document_starts - 1] = IGNORE_INDEX
            boundaries.append(row * S + document_starts[document_starts < S])
        boundaries.append(np.array([len(rows) * S]))
        return _as_micro_batch(
            input_ids_BS,
            targets_BS,
            torch.from_numpy(np.concatenate(boundaries).astype(np.int32)),
            input_tokens=int((rows != FILLER).sum()) * S,
        )


class PaddedSequences:
    """One document per sequence, cut to S inputs or filled up with [PAD].

    What a document has beyond S + 1 tokens is not trained on.
    """

    def __init__(self, split: TokenFile | TokenShards, sequence_length: int):
        self._split = TokenShards.of(split)
        self.sequence_length = sequence_length
        self._length = self._split.num_documents
        if self._length == 0:
            raise SequencesError(f"{split.path}: holds no document")

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
            start, end = self._split.document_span(int(index))
            window = self._split.tokens[start : min(end, start + S + 1)]
            length = len(window) - 1
            input_ids_BS[row, :length] = window[:-1]
            targets_BS[row, :length] = window[1:]
            input_tokens += length
        return _as_micro_batch(input_ids_BS, targets_BS, None, input_tokens)


def make_sequences(
    split: TokenFile | TokenShards, sequences: Literal["packed", "padded"], sequence_length: int
) -> PackedSequences | PaddedSequences:
    """The sequences that `training.sequences` names.

    Raises:
        SequencesError: the split is too small for one.
    """
    if sequences == "packed":
        return PackedSequences(split, sequence_length)
    return PaddedSequences(split, sequence_length)


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
