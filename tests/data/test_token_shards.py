"""Shards: however a split is cut into files, its reader sees the same tokens and documents."""

import errno
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.data.sequences import make_sequences
from stages.data.token_files import TokenFileError, TokenFileWriter
from stages.data.token_shards import TokenShards, TokenShardsWriter

VOCAB = 300
lengths_of_documents = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def write(folder: Path, lengths: list[int], shard_tokens: int, at_a_time: int = 3) -> TokenShards:
    """Documents of these lengths with random tokens, the same in every folder."""
    tokens = np.random.default_rng(0).integers(3, VOCAB, sum(lengths))
    ends = np.cumsum([0, *lengths])
    with TokenShardsWriter(
        folder, split="train", vocab_size=VOCAB, tokenizer_sha256="ab", shard_tokens=shard_tokens
    ) as writer:
        for first in range(0, len(lengths), at_a_time):
            some = np.array(lengths[first : first + at_a_time])
            block = tokens[ends[first] : ends[min(first + at_a_time, len(lengths))]]
            writer.append_documents(block, some, 10 * some)
    return TokenShards.open(folder, "train")


@settings(max_examples=80, deadline=None)
@given(
    lengths=lengths_of_documents,
    shard_tokens=st.integers(1, 40),
    at_a_time=st.integers(1, 5),
    data=st.data(),
)
def test_shards_read_as_one_file(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    shard_tokens: int,
    at_a_time: int,
    data: st.DataObject,
) -> None:
    one_folder, folder = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("shards")
    (one,) = write(one_folder, lengths, 10**6).files
    shards = write(folder, lengths, shard_tokens, at_a_time)

    names = sorted(path.name for path in folder.iterdir())
    count = len(shards.files)
    if count == 1:
        assert names == ["train.safetensors"]
    else:
        assert names == [f"train-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert all(len(file.tokens) <= shard_tokens or file.num_documents == 1 for file in shards.files)

    assert (len(shards.tokens), shards.num_documents) == (len(one.tokens), one.num_documents)
    assert shards.vocab_size == VOCAB
    np.testing.assert_array_equal(shards.document_offsets, one.document_offsets)
    np.testing.assert_array_equal(shards.document_bytes, one.document_bytes)
    start = data.draw(st.integers(0, len(one.tokens)))
    stop = data.draw(st.integers(start, len(one.tokens) + 3))
    np.testing.assert_array_equal(shards.tokens[start:stop], one.tokens[start:stop], strict=True)
    offsets = one.document_offsets
    for index in range(one.num_documents):
        assert shards.document_span(index) == (offsets[index], offsets[index + 1])
    wanted = offsets[(offsets >= start) & (offsets <= stop)]
    np.testing.assert_array_equal(shards.document_starts(start, stop), wanted)


@settings(max_examples=30, deadline=None)
@given(lengths=lengths_of_documents, kind=st.sampled_from(["packed", "padded"]))
def test_training_sees_no_shards(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], kind: Literal["packed", "padded"]
) -> None:
    lengths = [12, *lengths]
    (one,) = write(tmp_path_factory.mktemp("one"), lengths, 10**6).files
    shards = write(tmp_path_factory.mktemp("shards"), lengths, 13)
    assert len(lengths) < 3 or len(shards.files) > 1
    from_one, from_shards = make_sequences(one, kind, 4), make_sequences(shards, kind, 4)
    assert len(from_one) == len(from_shards)
    wanted, found = (s.micro_batch(range(len(s))) for s in (from_one, from_shards))
    assert torch.equal(wanted.input_ids_BS, found.input_ids_BS)
    assert torch.equal(wanted.targets_BS, found.targets_BS)
    if wanted.cu_seqlens is not None and found.cu_seqlens is not None:
        assert torch.equal(wanted.cu_seqlens, found.cu_seqlens)
    assert (wanted.target_tokens, wanted.input_tokens) == (found.target_tokens, found.input_tokens)


def test_only_whole_windows_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every 2th token"):
        write(tmp_path, [5, 5], 5).tokens[::2]


def test_a_split_with_a_shard_missing_is_refused(tmp_path: Path) -> None:
    shards = write(tmp_path, [5, 5, 5], 5)
    assert len(shards.files) == 3
    second = tmp_path / "train-00002-of-00003.safetensors"
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(TokenFileError, match=r"not one set \(2 files, the last is train-00003-of-00003"):
        TokenShards.open(tmp_path, "train")
    second.write_bytes(content[:-1])
    with pytest.raises(TokenFileError, match="is cut off"):
        TokenShards.open(tmp_path, "train")


def test_shards_of_another_run_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [5, 5, 5], 5)
    other = tmp_path / "train.safetensors"
    with TokenShardsWriter(
        tmp_path, split="train", vocab_size=VOCAB, tokenizer_sha256="other", shard_tokens=9
    ) as writer:
        writer.append_documents(np.array([3]), np.array([1]), np.array([1]))
    with pytest.raises(TokenFileError, match="not one set"):
        TokenShards.open(tmp_path, "train")
    other.rename(tmp_path / "train-00003-of-00003.safetensors")
    with pytest.raises(TokenFileError, match="differ in kind"):
        TokenShards.open(tmp_path, "train")


def test_a_missing_split_names_the_stage(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=r"train\.safetensors: no such file; run the tokenize stage"):
        TokenShards.open(tmp_path, "train")


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        TokenShardsWriter(
            tmp_path, split="train", vocab_size=9, tokenizer_sha256="", shard_tokens=2
        ) as writer,
    ):
        for _ in range(3):
            writer.append_documents(np.array([1, 2]), np.array([2]), np.array([1]))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_while_a_file_ends_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: TokenFileWriter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TokenFileWriter, "_assemble", full)
    tokens, one = np.arange(6, dtype=np.uint16), np.array([3, 3])
    with (
        pytest.raises(OSError, match="No space left"),
        TokenShardsWriter(
            tmp_path, split="train", vocab_size=300, tokenizer_sha256="x", shard_tokens=4
        ) as writer,
    ):
        writer.append_documents(tokens, one, one)
    assert list(tmp_path.iterdir()) == []
