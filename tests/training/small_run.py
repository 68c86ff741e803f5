"""A whole training at a size that takes milliseconds: params, tokens, state."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.data.batch_order import BatchOrder
from stages.data.sequences import MicroBatch, PackedSequences, PaddedSequences, make_sequences
from stages.data.special_tokens import BOT_ID, EOT_ID
from stages.data.token_files import TokenFile, TokenFileWriter
from stages.model.hugging_face import to_hugging_face
from stages.params import Params, VariantParams, check_params
from stages.training.precision import PrecisionPolicy
from stages.training.state import TrainState, initial_state
from stages.training.step import StepOutcome, train_step

CPU = torch.device("cpu")
VOCAB = 260
SEQUENCE_LENGTH = 16
GLOBAL_BATCH_SIZE = 8


def small_params(variant: dict[str, Any] | None = None, /, **training: Any) -> Params:
    """Params with one variant, `v`. `model` changes the model's, `seed` the seed, all others training's."""
    model = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
    } | training.pop("model", {})
    return check_params(
        {
            "seed": training.pop("seed", 5),
            "corpus": {"source": "embedded"},
            "tokenizer": {"vocab_size": VOCAB},
            "model": model,
            "training": {
                "sequence_length": SEQUENCE_LENGTH,
                "global_batch_size": GLOBAL_BATCH_SIZE,
                "token_budget": 20 * GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH,
                "learning_rate": 0.01,
                "warmup_steps": 3,
                "log_every_steps": 4,
                # Adam divides by sqrt(v) + epsilon. With the usual 1e-8 a gradient that is 0 but for
                # rounding moves its weight a whole learning rate, in a direction that rounding chose.
                "adam_epsilon": 1e-5,
            }
            | training,
            "hardware": {"device": "cpu"},
            "variants": {"v": {"micro_batch_size": GLOBAL_BATCH_SIZE} | (variant or {})},
        }
    )


def token_file(folder: Path, documents: int = 23, seed: int = 0, longest: int = 40) -> TokenFile:
    """Documents of 3 to `longest` tokens that can be learned: each counts up from its own start."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.safetensors"
    with TokenFileWriter(path, split="train", vocab_size=VOCAB, tokenizer_sha256="") as writer:
        for _ in range(documents):
            length = int(generator.integers(1, longest - 1))
            words = 3 + (int(generator.integers(0, 60)) + np.arange(length)) % (VOCAB - 3)
            writer.append(np.array([BOT_ID, *words, EOT_ID]), length)
    return TokenFile.open(path)


@dataclass
class SmallRun:
    """A variant with its data; `step` does what the loop would do next."""

    params: Params
    sequences: PackedSequences | PaddedSequences
    state: TrainState
    policy: PrecisionPolicy

    @property
    def variant(self) -> VariantParams:
        return self.params.variants["v"]

    def micro_batches(self, step: int | None = None) -> list[MicroBatch]:
        """The global batch of a step. At this size the third batch of an epoch ends in FILLER rows."""
        training = self.params.training
        order = BatchOrder(self.params.seed, training.global_batch_size, len(self.sequences))
        indices = order.indices(self.state.step if step is None else step)
        rows = indices.reshape(-1, self.variant.micro_batch_size)
        return [self.sequences.micro_batch(row) for row in rows]

    def step(self) -> StepOutcome:
        return train_step(self.state, self.micro_batches(), self.variant, self.params.training, self.policy)

    def gradients(self, micro_batches: Sequence[MicroBatch] | None = None) -> dict[str, torch.Tensor]:
        """What the optimizer is handed in one step (taken), under Hugging Face's names."""
        seen: dict[str, torch.Tensor] = {}

        def keep(*_: object) -> None:
            for name, parameter in self.state.model.named_parameters():
                assert parameter.grad is not None, name
                seen[name] = parameter.grad.clone()

        hook = self.state.optimizer.register_step_pre_hook(keep)
        batches = self.micro_batches() if micro_batches is None else micro_batches
        train_step(self.state, batches, self.variant, self.params.training, self.policy)
        hook.remove()
        return to_hugging_face(seen, self.params.model)


def small_run(
    folder: Path, params: Params, scaler: torch.amp.GradScaler | None = None, longest_document: int = 40
) -> SmallRun:
    state, policy = initial_state(params, "v", CPU)
    if scaler is not None:
        state.scaler = scaler
    training = params.training
    tokens = token_file(folder, longest=longest_document)
    sequences = make_sequences(tokens, training.sequences, training.sequence_length)
    return SmallRun(params, sequences, state, policy)


def weights(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.model.state_dict().items()}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """L2 norm of the difference over all tensors together, relative to `expected`."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    size = sum(float(expected[n].double().square().sum()) for n in expected)
    return float((difference / size) ** 0.5)


def bit_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)
