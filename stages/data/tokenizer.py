"""Byte-level BPE: learning it, encoding documents with it, decoding.

Byte-level (Radford et al. 2019): a text is its UTF-8 bytes, so that every text can be encoded and
comes back exactly. Merges never cross the borders of GPT-2's pre-tokenizer.
"""

import os
import re
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stages.data.special_tokens import BOT_ID, EOT_ID, SPECIAL_TOKENS

# An Encoding takes about 100 bytes a token, so what is encoded at one time is bounded by text and
# not by documents: 256 Ki characters hold about 10 MB. Four times as many take 7 % longer.
_CHARACTERS_PER_BATCH = 2**18
_PIECES_PER_BATCH = 8192
_CHARACTERS_PER_PIECE = 2**13

_CUT = re.compile(r"[ \n](?=[^\W_])")


class TokenizerError(ValueError):
    """A tokenizer file cannot be used."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, training_bytes: int) -> Tokenizer:
    """Learn merges from the first `training_bytes` UTF-8 bytes of `texts`; deterministic.

    The vocabulary has fewer than `vocab_size` tokens where the text has no more pairs to merge.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_up_to(texts, training_bytes), trainer)
    return _text_is_never_special(tokenizer)


def use_threads(number: int) -> None:
    """How many threads encode and learn in this process; too late where any has yet."""
    os.environ["RAYON_NUM_THREADS"] = str(number)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if number > 1 else "false"


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json` that `tokenize` wrote.

    Raises:
        TokenizerError: no such file, not a tokenizer, or its special tokens have other ids.
    """
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TokenizerError(f"{path}: no such file; run the tokenize stage") from None
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{path}: not a tokenizer: {error}") from None
    found = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    if found != list(range(len(SPECIAL_TOKENS))):
        raise TokenizerError(
            f"{path}: {', '.join(SPECIAL_TOKENS)} have the ids {found}, not 0, 1, 2; it is another "
            "program's tokenizer: run the tokenize stage"
        )
    return _text_is_never_special(tokenizer)


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> "Iterator[tuple[str, array[int]]]":
    """Each document's text with its tokens, `[BOT] ... [EOT]`, 32 bits each, in the order given.

    Encoding runs on all threads of tokenizers (RAYON_NUM_THREADS); the tokens do not depend on their
    number. Long documents are cut into pieces where no token can cross the cut.
    """
    # numpy takes three times as long over a list.
    tokens = array("I", [BOT_ID])
    for batch in _batches(texts):
        encodings = tokenizer.encode_batch_fast([piece for _, piece, _ in batch])
        for (text, _, is_last), encoding in zip(batch, encodings, strict=True):
            tokens.fromlist(encoding.ids)
            if is_last:
                tokens.append(EOT_ID)
                yield text, tokens
                tokens = array("I", [BOT_ID])


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of `ids`; special tokens are left out.

    Bytes that are not UTF-8, as where a sequence ends inside a character, become U+FFFD.
    """
    return tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token id; none for special tokens and for ids without a token.

    The bytes of a text's tokens, one after the other, are the text in UTF-8.
    """
    byte_of = _bytes_of_characters()
    found = [b""] * tokenizer.get_vocab_size()
    for token, token_id in tokenizer.get_vocab().items():
        if token_id >= len(SPECIAL_TOKENS):
            found[token_id] = bytes(byte_of[character] for character in token)
    return found


def cut_points(text: str, characters_per_piece: int = _CHARACTERS_PER_PIECE) -> Iterator[int]:
    """Where `text` may be cut so that its pieces encode to the tokens of the whole.

    GPT-2's pre-tokenizer starts a new word at a space or line end that a letter or digit follows,
    whatever stands before: a run of white space gives up its last character there.
    """
    cut = _CUT.search(text, characters_per_piece)
    while cut:
        yield cut.start()
        cut = _CUT.search(text, cut.start() + characters_per_piece)


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, str, bool]]]:
    """(text of a document, piece of it, whether it is the last piece) in batches of bounded size."""
    batch: list[tuple[str, str, bool]] = []
    characters = 0
    for text in texts:
        start = 0
        for end in (*cut_points(text), len(text)):
            batch.append((text, text[start:end], end == len(text)))
            characters += end - start
            start = end
            if characters >= _CHARACTERS_PER_BATCH or len(batch) >= _PIECES_PER_BATCH:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _up_to(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    for text in texts:
        data = text.encode("utf-8")
        if len(data) >= num_bytes:
            yield data[:num_bytes].decode("utf-8", "ignore")
            return
        num_bytes -= len(data)
        yield text


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's spelling: a printable byte of Latin-1 is itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _text_is_never_special(tokenizer: Tokenizer) -> Tokenizer:
    # Without this the characters "[EOT]" inside a document would end it.
    tokenizer.encode_special_tokens = True
    return tokenizer
