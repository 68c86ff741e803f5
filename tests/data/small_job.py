"""Texts encoded in small units and parts, and what they must become."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.data.encoding import EncodingJob, encode_unit, whole_parts
from stages.data.merging import Merger
from stages.data.sources import Unit, corpus_units
from stages.data.special_tokens import BOT_ID, EOT_ID
from stages.data.tokenizer import load_tokenizer, token_bytes, train_tokenizer
from stages.params import FilesCorpus

VOCAB = 320
WORDS = "the state of the union is strong, [EOT] naïve and 23 years old.\n\n we're not done"


def corpus_of(folder: Path, texts: Sequence[str]) -> FilesCorpus:
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "corpus.jsonl").write_text("".join(lines))
    paths = [str(folder / "corpus.jsonl")]
    return FilesCorpus.model_validate({"source": "files", "paths": paths, "validation_every": 3})


def job_of(folder: Path, corpus: FilesCorpus, part_text_bytes: int) -> EncodingJob:
    """`folder` gets the tokenizer.json and is where parts go."""
    folder.mkdir(exist_ok=True)
    content = train_tokenizer([WORDS * 9], VOCAB, 10**6).to_str().encode()
    (folder / "tokenizer.json").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    return EncodingJob(corpus, folder / "tokenizer.json", sha256, VOCAB, folder, part_text_bytes)


def encode_all(job: EncodingJob, units: Sequence[Unit]) -> int:
    """UTF-8 bytes that were said to be encoded."""
    tokenizer = load_tokenizer(job.tokenizer)
    return sum(sum(encode_unit(job, tokenizer, unit)) for unit in units)


def merge_all(job: EncodingJob, out: Path, shard_tokens: int = 10**6) -> Merger:
    """All parts of the job, merged into `out`."""
    out.mkdir()
    merger = Merger(
        out,
        token_bytes(load_tokenizer(job.tokenizer)),
        validation_every=3,
        vocab_size=VOCAB,
        tokenizer_sha256=job.tokenizer_sha256,
        shard_tokens=shard_tokens,
    )
    with merger:
        for unit in corpus_units(job.corpus):
            for part in whole_parts(job.folder, unit):
                merger.add(part)
    return merger


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens_of(job: EncodingJob, text: str) -> np.ndarray:
    return np.array([BOT_ID, *load_tokenizer(job.tokenizer).encode(text).ids, EOT_ID])
