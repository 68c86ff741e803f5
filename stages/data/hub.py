"""Documents of a Hugging Face dataset, streamed through `datasets`: nothing is stored on disk."""

import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any

from stages.data.documents import CorpusError, without_lone_surrogates
from stages.data.text_files import no_such_column
from stages.params import HubCorpus

_ROWS_PER_BATCH = 256


def count_hub_files(corpus: HubCorpus) -> int:
    """How many files the split is stored in; each can be read without the others.

    Raises:
        CorpusError: as `iterate_hub_texts`.
    """
    return int(_open_split(corpus).num_shards)


def iterate_hub_texts(corpus: HubCorpus, file: int | None = None) -> Iterator[str]:
    """The text of every row in the dataset's order, or of the rows of one of its files.

    Raises:
        CorpusError: the hub cannot be reached, or the dataset, its revision, configuration, split or
            column does not exist.
    """
    split = _open_split(corpus)
    rows = iter(split if file is None else split.shard(split.num_shards, file))
    try:
        for number in itertools.count():
            try:
                row = next(rows, None)
            except Exception as error:  # whatever the network stack below `datasets` raises
                raise _unreachable(corpus, error) from error
            if row is None:
                return
            if corpus.text_column not in row:
                raise no_such_column(corpus.dataset, corpus.text_column, list(row))
            text = row[corpus.text_column]
            if text is not None and not isinstance(text, str):
                raise CorpusError(
                    f"{corpus.dataset}, row {number}: {corpus.text_column!r} holds "
                    f"{type(text).__name__}, not text; set corpus.text_column to a column of strings"
                )
            yield without_lone_surrogates(text or "", f"{corpus.dataset}, row {number}", "replace")
    finally:
        # A parquet scanner that outlives the interpreter aborts the process (apache/arrow#45214).
        del rows, split
        gc.collect()


def _open_split(corpus: HubCorpus) -> Any:
    # huggingface_hub reads these when it is imported; 10 s, its default, is short for a busy hub.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "30")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "30")
    import datasets

    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(corpus.dataset, corpus.config, revision=corpus.revision)
        if hasattr(builder.config, "batch_size"):  # parquet: else a row group is one batch
            builder.config.batch_size = _ROWS_PER_BATCH
        return builder.as_streaming_dataset(split=corpus.split)
    except Exception as error:
        raise _unreachable(corpus, error) from error


def _unreachable(corpus: HubCorpus, error: Exception) -> CorpusError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    subset = f" ({corpus.config})" if corpus.config else ""
    if isinstance(error, ValueError):  # a configuration or split that does not exist
        return CorpusError(f"corpus: {corpus.dataset}{subset}, split {corpus.split}: {reason}")
    return CorpusError(
        f"corpus.dataset: {corpus.dataset}{subset} at revision {corpus.revision} cannot be read from the "
        f"Hugging Face hub: {reason}. Check the name, the revision and the network; without network, copy "
        "the dataset's .parquet or .jsonl files here and set corpus.source: files with corpus.paths"
    )
