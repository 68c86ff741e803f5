"""The tokenize stage: the corpus that params.yaml names becomes data/tokens/.

Run it with `python -m stages.tokenize_data`, or through `dvc repro`.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from stages.data.documents import CorpusError, Document, Split
from stages.data.sources import describe_corpus, iterate_documents, total_text_bytes
from stages.data.special_tokens import SPECIAL_TOKENS
from stages.data.token_files import TokenFileWriter
from stages.data.tokenizer import encode_documents, train_tokenizer
from stages.interruption import run_interruptible
from stages.outs import out_folder
from stages.params import Params, ParamsError, TokenizerParams, TrainingParams, load_params

OUT = Path("data/tokens")
SPLITS: tuple[Split, ...] = ("train", "validation")
_SECONDS_BETWEEN_LINES = 10.0


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m stages.tokenize_data", description=__doc__).parse_args(arguments)
    outcome = f"nothing of {OUT} was written; `dvc repro` runs it again"
    return run_interruptible("tokenize", _run, outcome)


def _run() -> int:
    try:
        params = load_params()
        _use_threads(params.tokenizer)
        tokenize(params, OUT)
    except (ParamsError, CorpusError, OSError) as error:
        print(f"tokenize: {error}", file=sys.stderr)
        return 1
    return 0


def tokenize(params: Params, out: Path) -> None:
    """Write tokenizer.json, train.safetensors, validation.safetensors and meta.json into `out`.

    The folder appears under its name when it is complete; the same corpus and params give the same
    bytes.

    Raises:
        CorpusError: the corpus cannot be used, or a split is too small for one sequence.
    """
    with out_folder(out) as folder:
        _write_all(params, folder)


def _use_threads(tokenizer: TokenizerParams) -> None:
    # Rayon reads this once, when tokenizers first runs in parallel.
    if tokenizer.workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(tokenizer.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"


def _write_all(params: Params, folder: Path) -> None:
    started = time.monotonic()
    total = total_text_bytes(params.corpus)
    tokenizer = _learn_tokenizer(params, total)
    tokenizer_json = tokenizer.to_str(pretty=True).encode("utf-8")
    (folder / "tokenizer.json").write_bytes(tokenizer_json)
    tokenizer_sha256 = hashlib.sha256(tokenizer_json).hexdigest()
    text_sha256 = {split: hashlib.sha256() for split in SPLITS}
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                TokenFileWriter(
                    folder / f"{split}.safetensors",
                    split=split,
                    vocab_size=params.tokenizer.vocab_size,
                    tokenizer_sha256=tokenizer_sha256,
                )
            )
            for split in SPLITS
        }
        documents = _with_progress("encoding", iterate_documents(params.corpus), total)
        for document, tokens in encode_documents(tokenizer, documents):
            text = document.text.encode("utf-8")
            text_sha256[document.split].update(text)
            writers[document.split].append(tokens, len(text))

    _check_size(writers, params.training)
    meta = {
        "corpus": describe_corpus(params.corpus),
        "tokenizer": {
            "vocab_size": params.tokenizer.vocab_size,
            "learned_vocab_size": tokenizer.get_vocab_size(),
            "sha256": tokenizer_sha256,
            "special_tokens": {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS},
        },
        "splits": {
            split: {
                "documents": writers[split].num_documents,
                "tokens": writers[split].num_tokens,
                "bytes": writers[split].num_bytes,
                "text_sha256": text_sha256[split].hexdigest(),
            }
            for split in SPLITS
        },
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    _print_summary(writers, time.monotonic() - started)


def _learn_tokenizer(params: Params, total_bytes: int | None) -> Tokenizer:
    vocab_size, training_bytes = params.tokenizer.vocab_size, params.tokenizer.training_bytes
    documents = _with_progress(
        "learning merges",
        iterate_documents(params.corpus, "train"),
        min(total_bytes, training_bytes) if total_bytes else None,
    )
    tokenizer = train_tokenizer((document.text for document in documents), vocab_size, training_bytes)
    if tokenizer.get_vocab_size() < vocab_size:
        print(
            f"tokenizer: the train split has only {tokenizer.get_vocab_size()} distinct tokens to learn; "
            f"tokenizer.vocab_size {vocab_size} leaves the rest unused"
        )
    return tokenizer


def _check_size(writers: dict[Split, TokenFileWriter], training: TrainingParams) -> None:
    """Say now, and not after the training, that a split has not even one packed sequence."""
    for split, writer in writers.items():
        if training.sequences == "packed" and writer.num_tokens < training.sequence_length + 1:
            raise CorpusError(
                f"corpus: the {split} split has {writer.num_tokens} tokens in {writer.num_documents} "
                f"documents, too few for one sequence of training.sequence_length "
                f"{training.sequence_length} and its last target; use more text, another "
                "corpus.validation_every, or shorter sequences"
            )


def _print_summary(writers: dict[Split, TokenFileWriter], seconds: float) -> None:
    for split, writer in writers.items():
        print(
            f"{split}: {writer.num_documents:,} documents, {writer.num_bytes / 1e6:,.2f} MB, "
            f"{writer.num_tokens:,} tokens ({writer.num_bytes / writer.num_tokens:.2f} bytes a token)"
        )
    megabytes = sum(writer.num_bytes for writer in writers.values()) / 1e6
    print(f"tokenized {megabytes:,.2f} MB in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s)")


def _with_progress(what: str, documents: Iterable[Document], total_bytes: int | None) -> Iterator[Document]:
    """`documents`, with a bar on a terminal and now and then a line elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[read]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task(what, total=total_bytes, read="")
        started = shown = time.monotonic()
        seconds_between_updates = _SECONDS_BETWEEN_LINES if progress.disable else 0.1
        num_bytes = 0

        def show() -> None:
            megabytes, seconds = num_bytes / 1e6, max(time.monotonic() - started, 1e-3)
            read = f"{megabytes:,.1f} MB, {megabytes / seconds:.1f} MB/s"
            progress.update(task, completed=num_bytes, read=read)
            if progress.disable:
                print(f"{what}: {read}", flush=True)

        for document in documents:
            yield document
            num_bytes += len(document.text.encode("utf-8"))
            if time.monotonic() - shown >= seconds_between_updates:
                shown = time.monotonic()
                show()
        show()
        progress.update(task, total=num_bytes)


if __name__ == "__main__":
    sys.exit(main())
