"""The work that all contenders do, and the techniques they do it with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONTENDERS = ("frugal", "trainer", "litgpt", "tutorial")
"""This project first: the others are compared with it."""
PEERS = CONTENDERS[1:]
TITLES = {"frugal": "this project", "trainer": "Trainer", "litgpt": "litgpt", "tutorial": "tutorial loop"}
"""For the reader of a table or a figure."""

OPTIMIZER = {
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
}
"""Constant over the steps, so that no schedule of one contender differs from another's."""


@dataclass(frozen=True)
class Work:
    """One model and how much of it at a time."""

    name: str
    vocab_size: int
    model: dict[str, Any]
    sequence_length: int
    micro_batch_sizes: tuple[int, ...]
    """The largest first. A contender that runs out of memory takes the next, with as many more of them in a
    step: the global batch stays. On a CPU there is one."""
    memory_limit_bytes: int | None = None
    """CUDA: the card that is stood in for."""

    @property
    def micro_batch_size(self) -> int:
        return self.micro_batch_sizes[0]


@dataclass(frozen=True)
class Technique:
    """What is switched on in every contender alike."""

    name: str
    precision: str
    recompute: bool = False
    compiled: bool = False
    micro_batches: int = 1
    """Of the work's size, in one optimizer step."""

    def steps(self, passes: int) -> int:
        """So many optimizer steps have `passes` forward and backward passes: steps of four micro-batches need
        not take four times as long to measure.
        """
        return math.ceil(passes / self.micro_batches)


def _model(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, sequence: int) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": sequence,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    }


WORKS = {
    work.name: work
    for work in (
        Work("W", 8_192, _model(256, 6, 8, 2, 688, 256), 256, (8,)),
        Work("W2", 50_000, _model(512, 8, 8, 2, 1_376, 512), 512, (4,)),
        # The model of presets/gpu_12gb.yaml.
        Work("R", 50_000, _model(768, 12, 12, 3, 3_072, 512), 512, (64, 32, 16, 8, 4), 12 * 2**30),
    )
}

TECHNIQUES = {
    technique.name: technique
    for technique in (
        Technique("fp32", "fp32"),
        Technique("tf32", "tf32"),
        Technique("amp", "amp_bf16"),
        Technique("amp_recompute", "amp_bf16", recompute=True),
        Technique("amp_compile", "amp_bf16", compiled=True),
        Technique("amp_compile_accumulate", "amp_bf16", compiled=True, micro_batches=4),
        Technique("everything", "amp_bf16", recompute=True, compiled=True, micro_batches=4),
    )
}


def default_works(device: str) -> list[str]:
    return ["W", "W2", "R"] if device == "cuda" else ["W", "W2"]


def default_techniques(device: str) -> list[str]:
    """All that the device can do: tf32 is a mode of NVIDIA's tensor cores."""
    return [name for name in TECHNIQUES if device == "cuda" or name != "tf32"]


def chosen(given: str | None, known: Sequence[str], default: Sequence[str], flag: str) -> list[str]:
    """The names of a comma-separated list, in their usual order.

    Raises:
        ValueError: one is unknown.
    """
    if given is None:
        return list(default)
    names = [name.strip() for name in given.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        found = f"{', '.join(unknown)}: unknown" if unknown else "is empty"
        raise ValueError(f"{flag} {found}; use one or more of {', '.join(known)}, with commas between")
    return [name for name in known if name in names]
