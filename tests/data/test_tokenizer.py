"""The tokenizer: any text comes back exactly, and text never becomes a special token."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from stages.data.documents import CorpusError
from stages.data.special_tokens import BOT_ID, EOT_ID, PAD_ID
from stages.data.tokenizer import (
    TokenizerError,
    cut_points,
    decode,
    encode_texts,
    load_tokenizer,
    token_bytes,
    train_tokenizer,
)

# The runs of white space make merges of white space, without which a cut inside a run goes unseen.
TEXTS = ["The state of the Union is strong.\n\n   \n \n\n\n  we're [BOT] here [EOT] [PAD].  \n  x " * 20]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 400, 10**6)


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    return [tokens.tolist() for _, tokens in encode_texts(tokenizer, texts)]


unicode_texts = st.text(st.characters(exclude_categories=["Cs"]))
special_texts = st.lists(st.sampled_from(["[BOT]", "[EOT]", "[PAD]", "[", "BOT", "]", " ", "\n", "a"])).map(
    "".join
)


@settings(deadline=None)
@given(texts=st.lists(unicode_texts | special_texts, max_size=5))
def test_any_text_comes_back_exactly(tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = encode(tokenizer, texts)
    assert [decode(tokenizer, tokens) for tokens in encoded] == texts
    spelled = token_bytes(tokenizer)
    assert [b"".join(spelled[token] for token in tokens).decode() for tokens in encoded] == texts
    for tokens in encoded:
        assert (tokens[0], tokens[-1]) == (BOT_ID, EOT_ID)
        assert not {BOT_ID, EOT_ID, PAD_ID} & set(tokens[1:-1])


def test_a_loaded_tokenizer_encodes_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    texts = [*TEXTS, "a[EOT]b"]
    assert encode(loaded, texts) == encode(tokenizer, texts)


def test_training_is_deterministic_and_reads_no_further_than_asked(tokenizer: Tokenizer) -> None:
    def texts() -> Iterable[str]:
        yield from TEXTS
        raise AssertionError("read beyond training_bytes")

    again = train_tokenizer(texts(), 400, len(TEXTS[0].encode()))
    assert again.to_str() == tokenizer.to_str()
    assert train_tokenizer(["é" * 100], 400, 7).get_vocab_size() < 400  # cut inside a character


def test_an_error_of_the_corpus_passes_through_training() -> None:
    def texts() -> Iterable[str]:
        yield "some text"
        raise CorpusError("broken.txt: not UTF-8")

    with pytest.raises(CorpusError, match=r"broken\.txt"):
        train_tokenizer(texts(), 400, 10**6)


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(
        unicode_texts
        | st.sampled_from([" ", "\n", "  ", "\n\n", "\t", "\r\n", "'s", "x", "7", "é", "。", "\x1c"]),
        max_size=20,
    ).map("".join),
    piece=st.integers(1, 6),
)
def test_pieces_encode_to_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str, piece: int) -> None:
    ends = [*cut_points(text, piece), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert "".join(pieces) == text
    ids = [token for part in pieces for token in tokenizer.encode(part).ids]
    assert ids == tokenizer.encode(text).ids


def test_documents_longer_than_a_batch(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.data.tokenizer._CHARACTERS_PER_BATCH", 20_000)
    long = TEXTS[0] * 60
    assert len(long) > 60_000
    assert encode(tokenizer, ["a", long, "b"])[1] == [BOT_ID, *tokenizer.encode(long).ids, EOT_ID]


def test_files_that_are_no_tokenizer_of_ours_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(TokenizerError, match="no such file"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        load_tokenizer(path)
    Tokenizer(models.BPE()).save(str(path))
    with pytest.raises(TokenizerError, match="another program"):
        load_tokenizer(path)
