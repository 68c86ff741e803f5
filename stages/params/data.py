"""Where the text comes from and how it becomes tokens."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from stages.params.section import Section


class EmbeddedCorpus(Section):
    """The US State of the Union addresses, 12 MB of public-domain English, installed by pip."""

    source: Literal["embedded"]
    validation_every: Annotated[int, Field(ge=2)] = 10
    """Every n-th document is validation; whole documents, never parts of one."""


class FilesCorpus(Section):
    """Local files: .txt (one document each), .jsonl and .parquet (one document a row)."""

    source: Literal["files"]
    paths: Annotated[tuple[str, ...], Field(min_length=1)]
    """Paths or globs (`data/raw/**/*.jsonl.gz`), relative to the repository; read in sorted order."""
    text_column: str = "text"
    """The field of a .jsonl or .parquet row that holds the document."""
    encoding_errors: Literal["fail", "replace"] = "fail"
    """What to do with bytes that are not UTF-8: stop and name them, or put U+FFFD in their place."""
    validation_every: Annotated[int, Field(ge=2)] = 10
    """Every n-th document is validation; whole documents, never parts of one."""


class HubCorpus(Section):
    """A dataset of the Hugging Face hub, streamed through `datasets`."""

    source: Literal["hub"]
    dataset: str
    """Name on the hub, for example HuggingFaceFW/fineweb."""
    config: str | None = None
    """Configuration (subset) of the dataset, for example sample-10BT."""
    split: str = "train"
    text_column: str = "text"
    revision: str
    """Commit hash of the dataset: without it the same params could mean other text tomorrow."""
    max_documents: PositiveInt | None = None
    """Stop after this many documents; null reads all of them."""
    validation_every: Annotated[int, Field(ge=2)] = 1000
    """Every n-th document is validation; whole documents, never parts of one."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.revision in ("main", "master", "HEAD"):
            yield (
                "revision",
                f"{self.revision!r} is a branch, which moves; use the commit hash that the "
                "dataset's page shows under Files and versions",
            )


CorpusParams = Annotated[EmbeddedCorpus | FilesCorpus | HubCorpus, Field(discriminator="source")]


class TokenizerParams(Section):
    """Byte-level BPE, trained on the train split alone."""

    vocab_size: Annotated[int, Field(ge=259, le=2**31)]
    """Number of token ids, the 256 bytes and the 3 special tokens included. Up to 65,536 a token
    takes 2 bytes on disk, above that 4."""
    training_bytes: PositiveInt = 100_000_000
    """The merges are learned from at most this many UTF-8 bytes from the start of the train split."""
    shard_tokens: PositiveInt = 250_000_000
    """A split of more tokens than this is several files, each of at most so many (500 MB at 2 bytes a token).
    Where they are cut changes no training."""
