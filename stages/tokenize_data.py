"""The tokenize stage: the corpus that params.yaml names becomes data/tokens/.

Run it with `python -m stages.tokenize_data`, or through `dvc repro`. It goes on from what was encoded
before it was stopped. Several jobs, on several machines perhaps, can each encode a part of the corpus
(`--shard 3/16`); run without --shard, it takes what they have made and encodes what is missing.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from stages.container_image import ContainerImageError
from stages.data.documents import CorpusError
from stages.data.encoding import EncodingJob, whole_parts
from stages.data.encoding_pool import EncodingError, encode_units
from stages.data.merging import SPLITS, DamagedPartError, Merger
from stages.data.sources import check_document_count, describe_corpus, iterate_documents, total_text_bytes
from stages.data.special_tokens import SPECIAL_TOKENS
from stages.data.token_files import TokenFileError
from stages.data.tokenizer import TokenizerError, load_tokenizer, token_bytes, train_tokenizer, use_threads
from stages.interruption import run_interruptible
from stages.outs import publish_folder, write_out
from stages.params import HubCorpus, Params, ParamsError, TrainingParams, load_params
from stages.tokenize_progress import EncodingProgress, documents_with_progress
from stages.tokenize_work import Shard, TokenizeWork, hold_tokenize_work
from stages.work_folder import WorkFolderError

OUT = Path("data/tokens")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.tokenize_data", description=__doc__)
    parser.add_argument("--shard", metavar="I/N", type=_shard, help="encode part I of N only, counted from 1")
    parser.add_argument("--workers", metavar="N", type=_positive, default=_cores(), help="cores to use")
    parser.add_argument("--fresh", action="store_true", help="start over, whatever is encoded")
    options = parser.parse_args(arguments)
    shard: Shard | None = options.shard
    if shard is None:
        name, outcome = "tokenize", f"nothing of {OUT} was written; `dvc repro` goes on from what is encoded"
    else:
        name = f"tokenize --shard {shard.number}/{shard.of}"
        outcome = "the same command goes on from what is encoded"
    return run_interruptible(name, lambda: _run(name, shard, options.workers, options.fresh), outcome)


def _run(name: str, shard: Shard | None, workers: int, fresh: bool) -> int:
    try:
        params = load_params()
        use_threads(workers)
        if shard is None:
            tokenize(params, OUT, workers=workers, fresh=fresh)
        else:
            encode_shard(params, shard, workers=workers, fresh=fresh)
    except (
        ParamsError,
        CorpusError,
        WorkFolderError,
        EncodingError,
        DamagedPartError,
        TokenFileError,
        TokenizerError,
        ContainerImageError,
        OSError,
    ) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def tokenize(params: Params, out: Path, *, workers: int = 1, fresh: bool = False) -> None:
    """Write tokenizer.json, the token files of both splits and meta.json into `out`.

    The folder appears under its name when it is complete. The same corpus and params give the same bytes,
    with any number of workers, stopped and gone on with or not, and by whatever shards. Where another process
    is making them, this one waits and takes those.

    Args:
        workers: cores to use.
        fresh: leave what was encoded before.

    Raises:
        CorpusError: the corpus cannot be used, or a split is too small for one sequence.
        WorkFolderError: what is in progress cannot be kept.
        EncodingError: a process that encodes died.
        DamagedPartError: what was encoded before is damaged.
    """
    started, began = time.monotonic(), time.time()
    with hold_tokenize_work(params, None, fresh=fresh) as work:
        if work.is_to_be_made_again(out, began):
            work.clear()
        if not work.complete.exists():
            _encode_and_merge(params, work, workers)
        work.remove_parts()
        meta = json.loads((work.complete / "meta.json").read_text())
        _check_size(meta["splits"], params.training)
        publish_folder({path.name: path for path in work.complete.iterdir()}, out)
    _print_summary(meta["splits"], time.monotonic() - started)


def encode_shard(params: Params, shard: Shard, *, workers: int = 1, fresh: bool = False) -> None:
    """Encode the units of one shard, for `tokenize` to merge.

    Raises:
        As `tokenize`.
    """
    if isinstance(params.corpus, HubCorpus) and params.corpus.max_documents is not None:
        raise CorpusError(
            "corpus.max_documents: only who reads all documents before it knows which one is the last, so "
            "it cannot be encoded in shards; leave it out, or run without --shard"
        )
    started = time.monotonic()
    with hold_tokenize_work(params, shard, fresh=fresh) as work:
        units = shard.units(work.units)
        whole = work.whole_units(units)
        missing = [unit for unit in units if unit.number not in whole]
        job = _learned(params, work)
        events = encode_units(job, missing, workers)
        with contextlib.closing(events), EncodingProgress(units, missing) as progress:
            for event in events:
                progress.show(event)
        parts = [part for unit in units for part in whole_parts(work.folder, unit)]
        num_documents = sum(part.num_documents for part in parts)
        print(
            f"shard {shard.number} of {shard.of}: {num_documents:,} documents in {len(units)} of "
            f"{len(work.units)} units, {time.monotonic() - started:.1f} s, in {work.folder}"
        )


def _encode_and_merge(params: Params, work: TokenizeWork, workers: int) -> None:
    whole = work.whole_units(work.units)
    missing = [unit for unit in work.units if unit.number not in whole]
    job = _learned(params, work)
    tokenizer = load_tokenizer(job.tokenizer)
    half = work.complete.with_name("complete.part")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    merged = 0

    def merge_one() -> None:
        """The next unit in the order of the corpus, where it is whole."""
        nonlocal merged
        if merged in whole:
            for part in whole_parts(whole[merged], work.units[merged]):
                merger.add(part)
            merged += 1

    with Merger(
        half,
        token_bytes(tokenizer),
        validation_every=params.corpus.validation_every,
        vocab_size=params.tokenizer.vocab_size,
        tokenizer_sha256=job.tokenizer_sha256,
        shard_tokens=params.tokenizer.shard_tokens,
    ) as merger:
        events = encode_units(job, missing, workers)
        with contextlib.closing(events), EncodingProgress(work.units, missing) as progress:
            for event in events:
                progress.show(event)
                if event.is_whole:
                    whole[event.unit.number] = work.folder
                merge_one()  # beside the encoding, which goes on
        while merged < len(work.units):
            merge_one()
    check_document_count(params.corpus, merger.num_documents)
    meta = {
        "corpus": describe_corpus(params.corpus),
        "tokenizer": {
            "vocab_size": params.tokenizer.vocab_size,
            "learned_vocab_size": tokenizer.get_vocab_size(),
            "sha256": job.tokenizer_sha256,
            "special_tokens": {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS},
        },
        "splits": {
            split: {
                "documents": merger.splits[split].num_documents,
                "tokens": merger.splits[split].num_tokens,
                "bytes": merger.splits[split].num_bytes,
                "text_sha256": merger.text_sha256(split),
            }
            for split in SPLITS
        },
    }
    write_out(half / "tokenizer.json", work.tokenizer.read_bytes())
    write_out(half / "meta.json", json.dumps(meta, indent=2) + "\n")
    half.rename(work.complete)


def _learned(params: Params, work: TokenizeWork) -> EncodingJob:
    """What the units are encoded with; learns the tokenizer where no job has yet."""
    tokenizer_json = work.known_tokenizer()
    if tokenizer_json is None:
        tokenizer_json = _learn_tokenizer(params).to_str(pretty=True).encode("utf-8")
    if not work.tokenizer.exists() or work.tokenizer.read_bytes() != tokenizer_json:
        write_out(work.tokenizer, tokenizer_json)
    return EncodingJob(
        params.corpus,
        work.tokenizer,
        hashlib.sha256(tokenizer_json).hexdigest(),
        params.tokenizer.vocab_size,
        work.folder,
    )


def _learn_tokenizer(params: Params) -> Tokenizer:
    vocab_size, training_bytes = params.tokenizer.vocab_size, params.tokenizer.training_bytes
    total_bytes = total_text_bytes(params.corpus) or training_bytes
    documents = documents_with_progress(
        "learning merges",
        iterate_documents(params.corpus, "train"),
        min(total_bytes, training_bytes),
    )
    tokenizer = train_tokenizer((document.text for document in documents), vocab_size, training_bytes)
    if tokenizer.get_vocab_size() < vocab_size:
        print(
            f"tokenizer: the train split has only {tokenizer.get_vocab_size()} distinct tokens to learn; "
            f"tokenizer.vocab_size {vocab_size} leaves the rest unused"
        )
    return tokenizer


def _check_size(splits: dict[str, dict[str, int]], training: TrainingParams) -> None:
    """Say now, and not after the training, that a split has not even one packed sequence."""
    for split, counts in splits.items():
        if training.sequences == "packed" and counts["tokens"] < training.sequence_length + 1:
            raise CorpusError(
                f"corpus: the {split} split has {counts['tokens']} tokens in {counts['documents']} "
                f"documents, too few for one sequence of training.sequence_length "
                f"{training.sequence_length} and its last target; use more text, another "
                "corpus.validation_every, or shorter sequences"
            )


def _print_summary(splits: dict[str, dict[str, int]], seconds: float) -> None:
    for split, counts in splits.items():
        print(
            f"{split}: {counts['documents']:,} documents, {counts['bytes'] / 1e6:,.2f} MB, "
            f"{counts['tokens']:,} tokens ({counts['bytes'] / counts['tokens']:.2f} bytes a token)"
        )
    megabytes = sum(counts["bytes"] for counts in splits.values()) / 1e6
    print(f"tokenized {megabytes:,.2f} MB in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s)")


def _shard(text: str) -> Shard:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N, such as 3/16")
    return Shard(int(match[1]), int(match[2]))


def _positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of cores, 1 or more")
    return int(text)


def _cores() -> int:
    """Those that this process may use, or what RAYON_NUM_THREADS says, as for the tokenizers library."""
    number = os.environ.get("RAYON_NUM_THREADS", "")
    if number.isdigit() and int(number) > 0:
        return int(number)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
