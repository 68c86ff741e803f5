"""From the text of a unit to its parts: token files of the documents in their order, both splits together.

A part ends with the document that fills it, so where parts end follows from the text alone. A process that
was killed goes on after its last whole part: the documents before are read again and not encoded again.
"""

import hashlib
import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stages.data.sources import Unit, iterate_unit_texts
from stages.data.token_files import TokenFile, TokenFileError, TokenFileWriter
from stages.data.tokenizer import encode_texts
from stages.params import CorpusParams

PART_TEXT_BYTES = 2**25
"""What a kill can cost each core: about ten seconds."""

_TOKENS_PER_WRITE = 2**16


@dataclass(frozen=True)
class EncodingJob:
    """What all units of a corpus are encoded with."""

    corpus: CorpusParams
    tokenizer: Path
    """tokenizer.json."""
    tokenizer_sha256: str
    vocab_size: int
    folder: Path
    """Where the parts are written."""
    part_text_bytes: int = field(default_factory=lambda: PART_TEXT_BYTES)


def whole_parts(folder: Path, unit: Unit) -> list[TokenFile]:
    """The parts of a unit that are there, from its first on."""
    parts: list[TokenFile] = []
    while not (parts and is_last(parts[-1])):
        try:
            parts.append(TokenFile.open(_part_path(folder, unit, len(parts))))
        except TokenFileError:
            break
    return parts


def is_last(part: TokenFile) -> bool:
    """Whether the unit ends with this part."""
    return part.metadata["is_last"] == "true"


def encode_unit(job: EncodingJob, tokenizer: Tokenizer, unit: Unit) -> Iterator[int]:
    """Write the parts of a unit that are missing; yields UTF-8 bytes of text as they are encoded.

    What earlier parts hold is yielded too.

    Raises:
        CorpusError: while reading.
        OSError: while writing.
    """
    finished = whole_parts(job.folder, unit)
    if finished and is_last(finished[-1]):
        return
    texts = iterate_unit_texts(job.corpus, unit)
    for text in itertools.islice(texts, sum(part.num_documents for part in finished)):
        yield len(text.encode("utf-8"))
    encoded = encode_texts(tokenizer, texts)
    document = next(encoded, None)
    for number in itertools.count(len(finished)):
        text_sha256 = hashlib.sha256()
        with TokenFileWriter(
            _part_path(job.folder, unit, number),
            split="both",
            vocab_size=job.vocab_size,
            tokenizer_sha256=job.tokenizer_sha256,
        ) as writer:
            block = _Block(writer)
            part_bytes = 0
            while document is not None and part_bytes < job.part_text_bytes:
                text_bytes = document[0].encode("utf-8")
                text_sha256.update(text_bytes)
                block.append(document[1], len(text_bytes))
                part_bytes += len(text_bytes)
                yield len(text_bytes)
                document = next(encoded, None)
            block.write()
            writer.metadata |= {
                "text_sha256": text_sha256.hexdigest(),
                "is_last": "true" if document is None else "false",
            }
        if document is None:
            return


class _Block:
    """Documents on their way to a writer."""

    def __init__(self, writer: TokenFileWriter):
        self._writer = writer
        self._tokens = array("I")
        self._lengths: list[int] = []
        self._num_bytes: list[int] = []

    def append(self, tokens: "array[int]", num_bytes: int) -> None:
        self._tokens += tokens
        self._lengths.append(len(tokens))
        self._num_bytes.append(num_bytes)
        if len(self._tokens) >= _TOKENS_PER_WRITE:
            self.write()

    def write(self) -> None:
        tokens = np.array(self._tokens)  # of a buffer, at once
        self._writer.append_documents(tokens, np.array(self._lengths), np.array(self._num_bytes))
        self._tokens, self._lengths, self._num_bytes = array("I"), [], []


def _part_path(folder: Path, unit: Unit, number: int) -> Path:
    return folder / f"{unit.number:06d}-{number:04d}.safetensors"
