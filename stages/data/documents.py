"""What a corpus is made of, and the error for a corpus that cannot be used."""

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation"]


class CorpusError(RuntimeError):
    """The corpus cannot be used; one sentence says which file or key, and what to do."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document. `index` counts the documents of the whole corpus, both splits, from 0."""

    index: int
    split: Split
    text: str


def split_of(index: int, validation_every: int) -> Split:
    """The last document of every `validation_every` is validation: indices n-1, 2n-1, ..."""
    return "validation" if index % validation_every == validation_every - 1 else "train"


def without_lone_surrogates(text: str, place: object, encoding_errors: Literal["fail", "replace"]) -> str:
    r"""`text` as it can be written in UTF-8.

    JSON can spell half of a surrogate pair (`"\ud83d"`), which is no character.

    Raises:
        CorpusError: it holds one and `encoding_errors` is "fail".
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if encoding_errors == "fail":
            raise CorpusError(
                f"{place}: character {error.start} of the text is half of a surrogate pair "
                f"(U+{ord(text[error.start]):04X}), which UTF-8 cannot hold; repair the text or set "
                "corpus.encoding_errors: replace"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
