"""Losses of whole documents against a plain loop over Hugging Face's model."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from stages.data.special_tokens import BOT_ID, EOT_ID
from stages.data.token_files import TokenFile, TokenFileWriter
from stages.evaluation.validation_loss import DocumentLosses, document_losses
from stages.model.llama import Llama
from tests.model.small_llama import VOCAB, hugging_face_twin, small_llama, small_params

# With a window of 16: a window and one token more or less, several windows, and [BOT] [EOT] alone.
LENGTHS = [5, 16, 17, 18, 33, 34, 2, 50, 3]


def validation_file(folder: Path, lengths: list[int]) -> TokenFile:
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "validation.safetensors"
    with TokenFileWriter(path, split="validation", vocab_size=VOCAB, tokenizer_sha256="") as writer:
        for length in lengths:
            words = generator.integers(3, VOCAB, length - 2)
            writer.append(np.array([BOT_ID, *words, EOT_ID][:length]), 3 * length + 1)
    return TokenFile.open(path)


def document(file: TokenFile, index: int) -> torch.Tensor:
    start, end = file.document_offsets[index : index + 2]
    return torch.from_numpy(file.tokens[start:end].astype(np.int64))


def plain_loop(model: Llama, file: TokenFile, window_tokens: int) -> list[float]:
    """One window at a time, nothing padded, nothing sorted, in fp64 after the logits."""
    twin = hugging_face_twin(model)
    nats = []
    for index in range(file.num_documents):
        ids = document(file, index)
        total = 0.0
        for first in range(0, len(ids) - 1, window_tokens):
            inputs = ids[first : first + window_tokens][: len(ids) - 1 - first]
            targets = ids[first + 1 : first + 1 + len(inputs)]
            with torch.no_grad():
                logits = twin(inputs[None]).logits[0].double()
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
        nats.append(total)
    return nats


@pytest.fixture(scope="module")
def model() -> Llama:
    return small_llama(small_params())


@pytest.mark.parametrize("window_tokens", [16, 7, 64])
def test_equals_a_plain_loop(tmp_path: Path, model: Llama, window_tokens: int) -> None:
    file = validation_file(tmp_path, LENGTHS)
    losses = document_losses(model, file, window_tokens, batch_size=3)
    assert losses.nats == pytest.approx(plain_loop(model, file, window_tokens), rel=1e-5)
    assert losses.tokens.tolist() == [length - 1 for length in LENGTHS]
    assert losses.bytes.tolist() == [3 * length + 1 for length in LENGTHS]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=8),
    window_tokens=st.integers(1, 20),
    batch_size=st.integers(1, 9),
)
def test_every_token_after_bot_is_a_target_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], window_tokens: int, batch_size: int
) -> None:
    """A model that knows nothing pays log V for each target, wherever windows and batches end."""
    model = Llama(small_params(num_hidden_layers=1), VOCAB)
    torch.nn.init.zeros_(model.lm_head.weight)
    file = validation_file(tmp_path_factory.mktemp("v"), lengths)
    done: list[int] = []
    losses = document_losses(model, file, window_tokens, batch_size, done.append)
    assert losses.tokens.tolist() == [length - 1 for length in lengths]
    assert losses.nats == pytest.approx([(length - 1) * math.log(VOCAB) for length in lengths], rel=1e-5)
    assert sum(done) == len(file.tokens) - file.num_documents


def test_the_batch_size_does_not_matter(tmp_path: Path, model: Llama) -> None:
    file = validation_file(tmp_path, LENGTHS)
    alone = document_losses(model, file, 16, batch_size=1)
    for batch_size in (2, 5, 100):
        assert document_losses(model, file, 16, batch_size).nats == pytest.approx(alone.nats, rel=1e-6)


def test_documents_do_not_see_their_neighbours(tmp_path: Path, model: Llama) -> None:
    many = document_losses(model, validation_file(tmp_path / "a", LENGTHS), 16, 4)
    first = document_losses(model, validation_file(tmp_path / "b", LENGTHS[:1]), 16, 4)
    assert many.nats[0] == pytest.approx(first.nats[0], rel=1e-6)


def test_the_file_does_not_matter_after_a_window(tmp_path: Path, model: Llama) -> None:
    """A window sees nothing of the one before, so a long document is the sum of its windows."""
    file = validation_file(tmp_path, [34])
    ids = document(file, 0)
    with torch.no_grad():
        logits = model.lm_head(model(ids[16:32][None]))[0].double()
        second = F.cross_entropy(logits, ids[17:33], reduction="sum")
        logits = model.lm_head(model(ids[:16][None]))[0].double()
        first = F.cross_entropy(logits, ids[1:17], reduction="sum")
        logits = model.lm_head(model(ids[32:33][None]))[0].double()
        third = F.cross_entropy(logits, ids[33:34], reduction="sum")
    expected = float(first + second + third)
    assert document_losses(model, file, 16, 2).nats[0] == pytest.approx(expected, rel=1e-5)


def test_figures_by_hand() -> None:
    losses = DocumentLosses(
        nats=np.array([2 * math.log(2), 6 * math.log(2)]),
        tokens=np.array([1, 7]),
        bytes=np.array([1, 3]),
    )
    # 8 bits over 8 tokens and 4 bytes; the mean of the documents' means would be 10/7 bits a token.
    assert losses.bits_per_byte == pytest.approx(2.0)
    assert losses.nats_per_token == pytest.approx(math.log(2))
    assert losses.perplexity == pytest.approx(2.0)


def test_no_gradients_are_kept(tmp_path: Path, model: Llama) -> None:
    document_losses(model, validation_file(tmp_path, [9]), 16, 1)
    assert all(parameter.grad is None for parameter in model.parameters())
