"""What a user would write instead of the tokenize stage, with `tokenizers` alone.

    python pipeline_bare_encode.py TOKENIZER.json OUT CORPUS.jsonl…

The loop that the tokenize stage is measured against. No splits, no hashes, no documents' borders.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

_DOCUMENTS_PER_BATCH = 1000  # as `datasets.map(batched=True)` takes them


def batches(files: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for name in files:
        with Path(name).open(encoding="utf-8") as file:
            for line in file:
                batch.append(json.loads(line)["text"])
                if len(batch) == _DOCUMENTS_PER_BATCH:
                    yield batch
                    batch = []
    if batch:
        yield batch


def main(tokenizer_json: str, out: str, *files: str) -> None:
    tokenizer = Tokenizer.from_file(tokenizer_json)
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    with Path(out).open("wb") as file:
        for batch in batches(list(files)):
            for encoding in tokenizer.encode_batch(batch):
                np.array(encoding.ids, dtype).tofile(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
