"""The train step against a plain PyTorch loop, and against itself cut into other micro-batches."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from stages.data.sequences import FILLER, IGNORE_INDEX, MicroBatch
from stages.model.hugging_face import to_hugging_face
from stages.params import Params
from tests.model.small_llama import hugging_face_twin
from tests.training.small_run import SmallRun, bit_equal, distance, small_params, small_run, weights


class PlainLoop:
    """Hugging Face's model, AdamW without any kernel, one document at a time, one division at the end."""

    def __init__(self, run: SmallRun):
        self.training = run.params.training
        self.twin = hugging_face_twin(run.state.model)
        matrices = [p for p in self.twin.parameters() if p.dim() == 2]
        gains = [p for p in self.twin.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.training.weight_decay},
                {"params": gains, "weight_decay": 0},
            ],
            betas=(self.training.adam_beta1, self.training.adam_beta2),
            eps=self.training.adam_epsilon,
            fused=False,
            foreach=False,
        )
        self.steps = 0

    def backward(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Leaves the gradients of the mean over all targets; returns that mean."""
        self.optimizer.zero_grad()
        documents = [document for batch in micro_batches for document in _documents(batch)]
        count = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in documents)
        losses = [
            F.cross_entropy(self.twin(ids[None]).logits[0], targets, reduction="sum")
            for ids, targets in documents
        ]
        loss = torch.stack(losses).sum() / count
        loss.backward()
        return float(loss.detach())

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        loss = self.backward(micro_batches)
        gradients = [p.grad for p in self.twin.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        limit = self.training.max_grad_norm
        if limit is not None and norm > limit:
            for gradient in gradients:
                gradient *= limit / norm
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        self.steps += 1
        return loss, norm

    def rate(self) -> float:
        t, k = self.training, self.steps
        if k < t.warmup_steps:
            return t.learning_rate * (k + 1) / t.warmup_steps
        progress = (k - t.warmup_steps) / (t.num_steps - 1 - t.warmup_steps)
        floor = t.min_learning_rate_ratio
        return t.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def _documents(batch: MicroBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    B, S = batch.input_ids_BS.shape
    starts = list(range(0, B * S + 1, S)) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    ids, targets = batch.input_ids_BS.flatten(), batch.targets_BS.flatten()
    for start, end in itertools.pairwise(starts):
        if (targets[start:end] != IGNORE_INDEX).any():
            yield ids[start:end], targets[start:end]


@pytest.mark.parametrize("sequences", ["packed", "padded"])
@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_equals_a_plain_loop(tmp_path: Path, sequences: str, loss: str, micro_batch_size: int) -> None:
    """Loss, norm and weights over warm-up, peak and decay, clipped and not."""
    variant = {"loss": loss, "loss_chunk_tokens": 20, "micro_batch_size": micro_batch_size}
    run = small_run(tmp_path, small_params(variant, sequences=sequences, max_grad_norm=2.1))
    plain = PlainLoop(run)
    norms = []
    for _ in range(7):
        batches = run.micro_batches()
        expected_loss, expected_norm = plain.step(batches)
        outcome = run.step()
        assert float(outcome.loss) == pytest.approx(expected_loss, rel=1e-5)
        assert float(outcome.grad_norm) == pytest.approx(expected_norm, rel=1e-4)
        assert not bool(outcome.skipped)
        norms.append(expected_norm)
    assert min(norms) < 2.1 < max(norms), "both sides of the clipping limit must have been seen"
    ours = to_hugging_face(weights(run.state), run.params.model)
    assert distance(ours, dict(plain.twin.state_dict())) < 1e-5
    assert run.state.step == 7


@pytest.mark.parametrize(
    "changed",
    [
        {"max_grad_norm": None},
        {"weight_decay": 0.0},
        {"warmup_steps": 0},
        {"adam_beta1": 0.5, "adam_beta2": 0.5},
        {"model": {"tie_word_embeddings": True}},
        {"model": {"num_key_value_heads": 4}},
    ],
    ids=str,
)
def test_equals_a_plain_loop_under_other_settings(tmp_path: Path, changed: dict[str, object]) -> None:
    run = small_run(tmp_path, small_params(**{"weight_decay": 3.0, **changed}))
    plain = PlainLoop(run)
    for _ in range(4):
        expected_loss, _ = plain.step(run.micro_batches())
        assert float(run.step().loss) == pytest.approx(expected_loss, rel=1e-5)
    theirs = dict(plain.twin.state_dict())
    if run.params.model.tie_word_embeddings:
        theirs.pop("lm_head.weight")
    assert distance(to_hugging_face(weights(run.state), run.params.model), theirs) < 1e-5


def accumulated(
    folder: Path, micro_batch_size: int, step: int, **settings: object
) -> dict[str, torch.Tensor]:
    variant = {"micro_batch_size": micro_batch_size, "loss": settings.pop("loss", "full")}
    run = small_run(folder, small_params(variant, **settings))
    return run.gradients(run.micro_batches(step))


def ragged_step(params: Params, folder: Path) -> int:
    """A step whose batch ends in FILLER rows."""
    run = small_run(folder, params)
    order = -(-len(run.sequences) // params.training.global_batch_size)
    last = order - 1
    ids = torch.cat([batch.targets_BS for batch in run.micro_batches(last)])
    assert (ids == IGNORE_INDEX).all(dim=1).any(), "the test's data must leave the last batch ragged"
    return last


@pytest.mark.parametrize("sequences", ["packed", "padded"])
@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("ragged", [False, True])
def test_micro_batches_do_not_change_the_gradients(
    tmp_path: Path, sequences: str, loss: str, ragged: bool
) -> None:
    step = ragged_step(small_params(sequences=sequences), tmp_path) if ragged else 0
    whole = accumulated(tmp_path, 8, step, sequences=sequences, loss=loss)
    for micro_batch_size in (1, 2, 4):
        pieces = accumulated(tmp_path, micro_batch_size, step, sequences=sequences, loss=loss)
        assert distance(pieces, whole) < 2e-6, micro_batch_size


@pytest.mark.parametrize("sequences", ["packed", "padded"])
def test_32_at_once_are_8_by_4_are_32_by_1(tmp_path: Path, sequences: str) -> None:
    """Of the 23 padded documents the batch is ragged: its last 9 rows are FILLER."""
    settings = {"sequences": sequences, "global_batch_size": 32, "token_budget": 5 * 32 * 16}
    whole = accumulated(tmp_path, 32, 0, **settings)
    for micro_batch_size in (4, 1):
        assert distance(accumulated(tmp_path, micro_batch_size, 0, **settings), whole) < 2e-6


def test_the_mean_of_means_is_another_gradient(tmp_path: Path) -> None:
    """What the step must not do, and proof that the batches above can tell."""
    params = small_params({"micro_batch_size": 1}, sequences="padded", max_grad_norm=None)
    run = small_run(tmp_path, params)
    batches = run.micro_batches(0)
    assert len({batch.target_tokens for batch in batches}) > 3
    plain = PlainLoop(run)
    plain.backward(batches)
    right = {name: p.grad.clone() for name, p in plain.twin.named_parameters() if p.grad is not None}
    plain.optimizer.zero_grad()
    for batch in batches:
        logits = plain.twin(batch.input_ids_BS).logits.flatten(0, 1)
        (F.cross_entropy(logits, batch.targets_BS.flatten()) / len(batches)).backward()
    wrong = {name: p.grad for name, p in plain.twin.named_parameters() if p.grad is not None}
    found = run.gradients(batches)
    assert distance(found, right) < 2e-6
    assert distance(found, wrong) > 0.05


def test_a_batch_of_filler_alone_changes_nothing_but_decay(tmp_path: Path) -> None:
    run = small_run(tmp_path, small_params(weight_decay=0.0))
    before = weights(run.state)
    gradients = run.gradients([run.sequences.micro_batch([FILLER] * 8)])
    assert all((gradient == 0).all() for gradient in gradients.values())
    assert bit_equal(weights(run.state), before)
    assert run.state.tokens == 0


def test_counts(tmp_path: Path) -> None:
    run = small_run(tmp_path, small_params({"micro_batch_size": 2}, sequences="padded"))
    tokens, loss = 0, 0.0
    for step in range(1, 4):
        tokens += sum(batch.input_tokens for batch in run.micro_batches())
        loss += float(run.step().loss)
        assert (run.state.step, run.state.tokens) == (step, tokens)
    assert float(run.state.loss_since_row) == pytest.approx(loss, rel=1e-6)
    assert tokens < 3 * 8 * 16, "padding must not have been counted"
    assert all(parameter.grad is None for parameter in run.state.model.parameters())


@pytest.mark.parametrize(("precision", "tolerance"), [("amp_bf16", 0.03), ("amp_fp16", 0.005)])
@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("sequences", ["packed", "padded"])
def test_gradients_under_autocast(
    tmp_path: Path, precision: str, tolerance: float, loss: str, sequences: str
) -> None:
    """Within what the format allows, with clipping and accumulation, and fp32 master weights."""
    settings = {"sequences": sequences, "max_grad_norm": 0.5}
    variant = {"precision": precision, "loss": loss, "micro_batch_size": 2}
    run = small_run(tmp_path, small_params(variant, **settings))
    exact = small_run(tmp_path, small_params(**settings)).gradients()
    found = run.gradients()
    assert 1e-5 < distance(found, exact) < tolerance
    assert all(gradient.dtype is torch.float32 for gradient in found.values())
    assert all(parameter.dtype is torch.float32 for parameter in run.state.model.parameters())


def test_training_learns(tmp_path: Path) -> None:
    run = small_run(tmp_path, small_params())
    losses = [float(run.step().loss) for _ in range(20)]
    assert losses[-1] < 0.75 * losses[0]
