"""Small trainings by several ranks, which are real processes, and by one that is alone to compare with."""

import json
import os
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from stages.data.sequences import make_sequences
from stages.data.token_files import TokenFile
from stages.measure.compilation import CompileWatch
from stages.measure.throughput import StepTimer
from stages.training.compilation import apply_compile
from stages.training.loop import Measurements, training_steps
from stages.training.parallel import Parallel
from stages.training.ranks import ALONE, Ranks, join_ranks, leave_ranks
from stages.training.recompute import apply_recompute
from stages.training.state import initial_state
from tests.training.small_run import small_params, token_file


@dataclass(frozen=True)
class Case:
    """A training; every step is a row."""

    techniques: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


def curves(
    folder: Path, ranks: int, cases: list[Case], device: str = "cpu"
) -> list[list[tuple[int, float, float]]]:
    """Of each case the tokens seen, the loss and the gradient's norm of every step, alike on all ranks."""
    token_file(folder)  # made once, for all
    if ranks == 1 and all(case.techniques.get("parallelism", "ddp") == "ddp" for case in cases):
        return [_curve(folder, case, ALONE, torch.device(device)) for case in cases]
    with tempfile.TemporaryDirectory(dir=folder) as results:
        start_ranks(_run, ranks, folder, cases, Path(results), device, device=device)
        found = [json.loads(path.read_text()) for path in sorted(Path(results).iterdir())]
    assert len(found) == ranks
    for others in found[1:]:
        assert others == found[0], "the ranks do not agree"
    return [[(row[0], row[1], row[2]) for row in curve] for curve in found[0]]


def start_ranks(function: Any, ranks: int, *arguments: Any, device: str = "cpu") -> None:
    """Run `function(Ranks, *arguments)` in so many processes; each has joined the others."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(_joined, (ranks, port, device, function, arguments), nprocs=ranks)


def _joined(
    rank: int, count: int, port: int, device_type: str, function: Any, arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ranks = Ranks(rank, count, rank, count)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    join_ranks(ranks, torch.device(device_type), timeout_minutes=1)
    function(ranks, *arguments)
    leave_ranks()


def _run(ranks: Ranks, folder: Path, cases: list[Case], results: Path, device: str) -> None:
    place = torch.device(device, ranks.rank) if device == "cuda" else torch.device(device)
    found = [_curve(folder, case, ranks, place) for case in cases]
    (results / f"{ranks.rank}.json").write_text(json.dumps(found))


def _curve(folder: Path, case: Case, ranks: Ranks, device: torch.device) -> list[tuple[int, float, float]]:
    params = small_params(case.techniques, **{"log_every_steps": 1, "ranks": ranks.count} | case.training)
    variant = params.variants["v"]
    state, policy = initial_state(params, "v", device, ranks)
    if state.scaler.is_enabled():  # the first steps overflow, and all ranks must agree on it
        state.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**26)
    apply_recompute(state.model, variant)
    apply_compile(state.model, variant)
    training = params.training
    tokens = TokenFile.open(folder / "train.safetensors")
    sequences = make_sequences(tokens, training.sequences, training.sequence_length)
    steps = training_steps(
        state,
        sequences,
        params,
        "v",
        policy,
        Measurements(StepTimer(), CompileWatch(enabled=False)),
        parallel=Parallel(state.model, variant, ranks),
    )
    return [(row.tokens, row.loss, row.grad_norm) for row in steps if row is not None]
