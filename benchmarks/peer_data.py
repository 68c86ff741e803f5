"""The data and the initial weights of the side-by-side runs: made from a seed, the same for every contender.

A folder holds what each contender reads in its own way:

    train.safetensors    this project's token file
    sequences.npy        int64 [N, S]: the same sequences in the order in which this project trains on them
    weights.safetensors  the initial weights under Hugging Face's names
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.peer_works import Work
from stages.data.batch_order import BatchOrder
from stages.data.special_tokens import SPECIAL_TOKENS
from stages.data.token_files import TokenFile, TokenFileWriter
from stages.model.hugging_face import to_hugging_face
from stages.model.llama import Llama
from stages.params import ModelParams


def make_data(folder: Path, work: Work, global_batch_size: int, steps: int, seed: int) -> None:
    """Fill `folder` for `steps` optimizer steps.

    Every document is as long as a sequence, so no sequence has a boundary inside: the peers would attend
    across it and this project would not. Tokens are drawn with Zipf's frequencies, so that there is something
    to learn; the last token of a row has no target for anybody.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = steps * global_batch_size
    generator = np.random.default_rng(seed)
    ids = np.arange(len(SPECIAL_TOKENS), work.vocab_size)
    weights = 1.0 / (np.arange(len(ids)) + 10.0)
    tokens = generator.choice(ids, size=(rows, work.sequence_length), p=weights / weights.sum())
    path = folder / "train.safetensors"
    with TokenFileWriter(path, split="train", vocab_size=work.vocab_size, tokenizer_sha256="none") as writer:
        for row in tokens:
            writer.append(row, num_bytes=len(row))
        # What the last sequence's last position would predict: a sequence needs one token more than it has.
        writer.append(tokens[0, :1], num_bytes=1)
    order = BatchOrder(seed, global_batch_size, rows)
    in_order = np.concatenate([order.indices(step) for step in range(steps)])
    stored = TokenFile.open(path).tokens[: rows * work.sequence_length].reshape(rows, -1)
    np.save(folder / "sequences.npy", stored[in_order].astype(np.int64))


def make_weights(folder: Path, work: Work, seed: int) -> int:
    """Write the weights that this project starts from; returns how many numbers they are."""
    folder.mkdir(parents=True, exist_ok=True)
    params = ModelParams(**work.model)
    model = Llama(params, work.vocab_size)
    model.initialise(seed)
    with torch.no_grad():
        named = to_hugging_face(dict(model.named_parameters()), params)
        save_file(
            {name: tensor.contiguous() for name, tensor in named.items()}, folder / "weights.safetensors"
        )
    return sum(parameter.numel() for parameter in model.parameters())
