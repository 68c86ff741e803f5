"""Sequences: every token is an input in its place, and targets never cross documents."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.data.sequences import (
    FILLER,
    IGNORE_INDEX,
    PackedSequences,
    PaddedSequences,
    SequencesError,
    make_sequences,
)
from stages.data.special_tokens import BOT_ID, EOT_ID, PAD_ID
from stages.data.token_files import TokenFile, TokenFileWriter


def token_file(folder: Path, lengths: list[int]) -> TokenFile:
    """Documents [BOT] x x+1 ... [EOT] of these lengths; no two of the other tokens are equal."""
    word = 3
    with TokenFileWriter(
        folder / "t.safetensors", split="train", vocab_size=10_000, tokenizer_sha256=""
    ) as writer:
        for length in lengths:
            writer.append(np.array([BOT_ID, *range(word, word + length - 2), EOT_ID]), 1)
            word += length
    return TokenFile.open(folder / "t.safetensors")


document_lengths = st.lists(st.integers(2, 12), min_size=2, max_size=10)


@settings(max_examples=60, deadline=None)
@given(lengths=document_lengths, sequence_length=st.integers(2, 9))
def test_packed_sequences_are_the_stream_cut_in_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], sequence_length: int
) -> None:
    file = token_file(tmp_path_factory.mktemp("t"), lengths)
    S = sequence_length
    if len(file.tokens) <= S:
        with pytest.raises(SequencesError, match=r"training\.sequence_length"):
            PackedSequences(file, S)
        return
    sequences = PackedSequences(file, S)
    assert len(sequences) == (len(file.tokens) - 1) // S
    batch = sequences.micro_batch(range(len(sequences)))
    inputs, targets = batch.input_ids_BS.flatten(), batch.targets_BS.flatten()
    stream = torch.from_numpy(file.tokens.astype(np.int64))
    assert torch.equal(inputs, stream[: len(inputs)])
    # Word for word: the target is the next token, except that after [EOT] there is none.
    following = stream[1 : len(inputs) + 1]
    assert torch.equal(targets, torch.where(inputs == EOT_ID, IGNORE_INDEX, following))
    assert batch.target_tokens == int((inputs != EOT_ID).sum())
    assert batch.input_tokens == inputs.numel()
    # Segments begin where a row begins or a document begins, and nowhere else.
    starts = {i for i in range(len(inputs)) if i % S == 0 or inputs[i] == BOT_ID}
    assert batch.cu_seqlens is not None and batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [*sorted(starts), len(inputs)]


@settings(max_examples=60, deadline=None)
@given(lengths=document_lengths, sequence_length=st.integers(2, 9))
def test_padded_sequences_are_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], sequence_length: int
) -> None:
    file = token_file(tmp_path_factory.mktemp("t"), lengths)
    sequences = PaddedSequences(file, sequence_length)
    assert len(sequences) == len(lengths)
    batch = sequences.micro_batch(np.arange(len(lengths)))
    assert batch.cu_seqlens is None
    total = 0
    for row, (start, end) in enumerate(
        zip(file.document_offsets[:-1], file.document_offsets[1:], strict=True)
    ):
        document = [int(token) for token in file.tokens[start:end]][: sequence_length + 1]
        real = len(document) - 1
        padding = sequence_length - real
        assert batch.input_ids_BS[row].tolist() == document[:-1] + [PAD_ID] * padding
        assert batch.targets_BS[row].tolist() == document[1:] + [IGNORE_INDEX] * padding
        total += real
    assert batch.target_tokens == batch.input_tokens == total


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_filler_rows_are_padding_that_counts_nowhere(
    tmp_path: Path, kind: Literal["packed", "padded"]
) -> None:
    sequences = make_sequences(token_file(tmp_path, [6, 6, 6]), kind, 4)
    alone = sequences.micro_batch([1])
    batch = sequences.micro_batch([FILLER, 1, FILLER])
    assert batch.input_ids_BS.shape == (3, 4)
    assert torch.equal(batch.input_ids_BS[1], alone.input_ids_BS[0])
    assert torch.equal(batch.targets_BS[1], alone.targets_BS[0])
    assert (batch.input_ids_BS[[0, 2]] == PAD_ID).all()
    assert (batch.targets_BS[[0, 2]] == IGNORE_INDEX).all()
    assert (batch.target_tokens, batch.input_tokens) == (alone.target_tokens, alone.input_tokens)
    if batch.cu_seqlens is not None and alone.cu_seqlens is not None:
        assert batch.cu_seqlens.tolist() == [0, *(alone.cu_seqlens + 4).tolist(), 12]


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("index", [-2, 1000])
def test_an_index_that_is_no_sequence_is_an_error(
    tmp_path: Path, kind: Literal["packed", "padded"], index: int
) -> None:
    with pytest.raises(IndexError, match=str(index)):
        make_sequences(token_file(tmp_path, [6, 6]), kind, 4).micro_batch([index])


def test_the_order_of_rows_is_the_order_asked_for(tmp_path: Path) -> None:
    sequences = PackedSequences(token_file(tmp_path, [9, 9, 9]), 4)
    forward, backward = sequences.micro_batch([0, 3]), sequences.micro_batch([3, 0])
    assert torch.equal(forward.input_ids_BS.flip(0), backward.input_ids_BS)
    assert torch.equal(forward.targets_BS.flip(0), backward.targets_BS)
