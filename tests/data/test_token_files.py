"""Token files: what is written is read back, and nothing half or foreign is taken for one."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from stages.data.token_files import TokenFile, TokenFileError, TokenFileWriter


def write(path: Path, documents: list[list[int]], vocab_size: int = 300) -> Path:
    with TokenFileWriter(path, split="train", vocab_size=vocab_size, tokenizer_sha256="ab") as writer:
        for tokens in documents:
            writer.append(np.array(tokens), num_bytes=10 * len(tokens))
    return path


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=9), max_size=6),
    vocab_size=st.sampled_from([300, 2**16, 2**16 + 1]),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int
) -> None:
    path = write(tmp_path_factory.mktemp("t") / "train.safetensors", documents, vocab_size)
    file = TokenFile.open(path)
    assert file.tokens.dtype == (np.uint16 if vocab_size <= 2**16 else np.uint32)
    offsets = file.document_offsets
    assert [list(file.tokens[a:b]) for a, b in itertools.pairwise(offsets)] == documents
    assert list(file.document_bytes) == [10 * len(tokens) for tokens in documents]
    assert file.num_documents == len(documents)
    assert (file.metadata["split"], file.vocab_size) == ("train", vocab_size)


@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_the_safetensors_library_reads_the_same_arrays(tmp_path: Path, vocab_size: int) -> None:
    path = write(tmp_path / "train.safetensors", [[0, 7, 1], [0, 299, 5, 1]], vocab_size)
    ours, theirs = TokenFile.open(path), load_file(path)
    assert sorted(theirs) == ["document_bytes", "document_offsets", "tokens"]
    for name, array in theirs.items():
        np.testing.assert_array_equal(getattr(ours, name), array, strict=True)


def test_same_documents_same_bytes(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, [[0, 7, 1], [0, 1]]) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_int64_tensors_are_aligned(tmp_path: Path) -> None:
    file = TokenFile.open(write(tmp_path / "a", [[0, 7, 1]]))
    assert file.document_offsets.flags.aligned and file.document_bytes.flags.aligned


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", [[0, 7, 1], [0, 8, 9, 1]]).read_bytes()
    part = tmp_path / "part"
    for length in range(len(whole)):
        part.write_bytes(whole[:length])
        with pytest.raises(TokenFileError, match=r"is cut off|cannot be opened|not a token file"):
            TokenFile.open(part)
    part.write_bytes(whole + b"x")
    with pytest.raises(TokenFileError, match=r"has \d+ bytes where its header says"):
        TokenFile.open(part)


@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=200))
def test_any_other_file_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("t") / "x"
    path.write_bytes(content)
    with pytest.raises(TokenFileError):
        TokenFile.open(path)


def test_a_safetensors_file_of_weights_is_refused(tmp_path: Path) -> None:
    save_file({"tokens": np.zeros(3, np.uint16)}, tmp_path / "w.safetensors")
    with pytest.raises(TokenFileError, match="not of tokens"):
        TokenFile.open(tmp_path / "w.safetensors")


def test_a_missing_file_names_the_stage(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="run the tokenize stage"):
        TokenFile.open(tmp_path / "none")


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    with (
        pytest.raises(KeyError),
        TokenFileWriter(path, split="train", vocab_size=9, tokenizer_sha256="") as writer,
    ):
        writer.append(np.array([1]), 1)
        assert list(tmp_path.iterdir()) == []
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [[], [300]])
def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="vocab_size 300"):
        write(tmp_path / "a", [tokens])
