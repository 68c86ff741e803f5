"""`TrainState`: everything that changes while training, and nothing else. It is what a checkpoint holds."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stages.model.llama import Llama
from stages.params import Params
from stages.training.optimizer import make_optimizer
from stages.training.parallel import is_sharded, shard_model
from stages.training.precision import PrecisionPolicy, apply_precision, precision_policy
from stages.training.ranks import ALONE, Ranks
from stages.training.schedule import WarmupCosine


@dataclass
class TrainState:
    """The fields are exactly what is saved and restored (stages/training/checkpoint.py)."""

    model: Llama
    optimizer: torch.optim.Optimizer
    schedule: WarmupCosine
    scaler: torch.amp.GradScaler
    step: int = 0
    """Optimizer steps tried, skipped ones included; with the seed it is the position in the data."""
    tokens: int = 0
    """Tokens seen, padding not counted."""
    skipped_steps: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """Steps that left the weights alone, because the loss or a gradient was no number (int64 scalar on
    the device, as are the other counts)."""
    skipped_in_a_row: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """Skipped steps since the last that was not."""
    loss_since_row: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32))
    """Sum of the steps' losses since the last row of the curve (fp32 scalar on the device)."""
    losses_since_row: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """So many losses are in that sum: those that were numbers."""


def initial_state(
    params: Params, variant: str, device: torch.device, ranks: Ranks = ALONE
) -> tuple[TrainState, PrecisionPolicy]:
    """A state at step 0: the weights depend on `params.seed` alone.

    Of a variant that shards, this rank's part of it; the ranks have joined (`join_ranks`).
    """
    techniques = params.variants[variant]
    policy = precision_policy(techniques, device)
    torch.manual_seed(params.seed)
    model = Llama(params.model, params.tokenizer.vocab_size)
    model.initialise(params.seed)
    if is_sharded(techniques):
        apply_precision(model, policy)
        shard_model(model, techniques, policy, device, ranks)  # moves it, block by block
    else:
        model.to(device)
        apply_precision(model, policy)
    # Where the optimizer steps: with fsdp_cpu_offload that is the host.
    weights_device = model.embed_tokens.weight.device
    schedule = WarmupCosine(params.training, weights_device)
    optimizer = make_optimizer(model, params.training, schedule.learning_rate, techniques)
    state = TrainState(model, optimizer, schedule, policy.make_scaler())
    for name in ("skipped_steps", "skipped_in_a_row", "loss_since_row", "losses_since_row"):
        setattr(state, name, getattr(state, name).to(device))
    return state, policy
