"""Cross-entropy of whole validation documents.

Bits per byte divides by the bytes of the text and not by tokens, so models with different tokenizers
can be compared (Gao et al. 2020, "The Pile", section 3.1).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from stages.data.sequences import IGNORE_INDEX
from stages.data.special_tokens import PAD_ID
from stages.data.token_files import TokenFile
from stages.data.token_shards import TokenShards
from stages.model.llama import Llama
from stages.model.loss import token_losses

_CHUNK_TOKENS = 2048  # tokens whose logits exist at one time


@dataclass(frozen=True)
class DocumentLosses:
    """Per validation document, in the order of the token file."""

    nats: np.ndarray
    """float64: cross-entropy summed over the document's targets, [EOT] included."""
    tokens: np.ndarray
    """int64: targets; everything after [BOT]."""
    bytes: np.ndarray
    """int64: UTF-8 bytes of the text."""

    @property
    def nats_per_token(self) -> float:
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean over all tokens, not a mean of means."""
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        return float(self.nats.sum() / math.log(2) / self.bytes.sum())


@torch.no_grad()
def document_losses(
    model: Llama,
    split: TokenFile | TokenShards,
    window_tokens: int,
    batch_size: int,
    on_progress: Callable[[int], object] = lambda tokens: None,
) -> DocumentLosses:
    """Loss of every document, cut into windows that each see nothing of the one before.

    Every token after [BOT] is a target exactly once. Windows are sorted by length, so that a batch of
    short documents is not computed at the width of a long one; causal attention makes the fill at the
    end of a row harmless.

    Args:
        model: in eval or train mode alike (there is no dropout), on any device.
        split: validation documents.
        window_tokens: inputs in one window; the training's sequence length.
        batch_size: windows in one forward pass.
        on_progress: called with the number of targets done, batch by batch.
    """
    device = model.embed_tokens.weight.device
    documents = split.num_documents
    nats, tokens = np.zeros(documents), np.zeros(documents, np.int64)
    windows = sorted(_windows(split.document_offsets, window_tokens), key=lambda w: w[1] - w[2])
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        width = max(end - start for _, start, end in batch)
        inputs = np.full((len(batch), width), PAD_ID, np.int64)
        targets = np.full((len(batch), width), IGNORE_INDEX, np.int64)
        for row, (_, start, end) in enumerate(batch):
            inputs[row, : end - start] = split.tokens[start:end]
            targets[row, : end - start] = split.tokens[start + 1 : end + 1]
        hidden_BSD = model(torch.from_numpy(inputs).to(device))
        losses = token_losses(
            hidden_BSD.flatten(0, 1),
            model.lm_head.weight,
            torch.from_numpy(targets).to(device).flatten(),
            _CHUNK_TOKENS,
        )
        row_nats = losses.double().view(len(batch), width).sum(1).cpu().numpy()
        for (document, start, end), value in zip(batch, row_nats, strict=True):
            nats[document] += value
            tokens[document] += end - start
        on_progress(sum(end - start for _, start, end in batch))
    return DocumentLosses(nats, tokens, np.asarray(split.document_bytes, np.int64))


def _windows(document_offsets: np.ndarray, window_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(document, first input token, one past the last input token) over all documents."""
    for document, (start, end) in enumerate(itertools.pairwise(document_offsets)):
        for first in range(int(start), int(end) - 1, window_tokens):
            yield document, first, min(first + window_tokens, int(end) - 1)
