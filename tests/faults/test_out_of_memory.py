"""Memory that really runs out: the address space of the training is limited."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.stage_process import Ended, StageProcess, checkpoints
from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow

BATCH = 256
"""Sequences of 64 tokens: with 4096 channels a feed-forward tensor of the whole batch takes 256 MiB."""
ROOM_BYTES = 700 * 2**20
"""Beyond what a training of the smallest micro-batch takes; the whole batch needs twice that."""


@pytest.fixture
def wide(repository: Repository) -> Repository:
    def edit(params: dict[str, Any]) -> None:
        params["model"] |= {"hidden_size": 64, "intermediate_size": 4096}
        params["training"] |= {
            "sequence_length": 64,
            "global_batch_size": BATCH,
            "token_budget": 64 * BATCH * 4,
            "log_every_steps": 2,
        }
        params["checkpoints"] = {"every_steps": 2}
        params["variants"] = {"baseline": {"precision": "fp32", "micro_batch_size": BATCH}}

    repository.edit_params(edit)
    return repository


def set_micro_batch(repository: Repository, size: int) -> None:
    repository.edit_params(lambda params: params["variants"]["baseline"].update(micro_batch_size=size))


def train_within(repository: Repository, limit_bytes: int) -> Ended:
    limit = ("bash", "-c", f'ulimit -v {limit_bytes // 1024}; exec "$@"', "limited")
    return StageProcess(repository, "train", "baseline", prefix=limit).end()


@pytest.fixture
def limit_bytes(wide: Repository, tmp_path: Path) -> int:
    """Enough for micro-batches of a few sequences, measured."""
    copy = wide.copy_to(tmp_path / "copy" / "repository")
    set_micro_batch(copy, 4)
    process = StageProcess(copy, "train", "baseline")
    peak = 0
    while process.process.poll() is None:
        try:
            status = Path(f"/proc/{process.process.pid}/status").read_text()
        except FileNotFoundError:
            break
        if found := re.search(r"VmPeak:\s+(\d+) kB", status):
            peak = max(peak, int(found[1]) * 1024)
        time.sleep(0.05)
    assert process.end().status == 0
    assert peak
    return peak + ROOM_BYTES


def test_the_message_says_what_fits(wide: Repository, limit_bytes: int) -> None:
    ended = train_within(wide, limit_bytes)
    assert ended.status == 1, ended
    (line,) = ended.errors()
    size = r"[\d.]+ [KMG]iB"
    told = re.match(
        rf"train baseline: out of memory: {size} could not be had beside {size} in use; the plan predicts a "
        rf"peak of {size} with micro_batch_size {BATCH}; less would need "
        rf"variants\.baseline\.micro_batch_size: {BATCH // 2} \({size}, (fits|may not fit)\)",
        line,
    )
    assert told, ended
    assert re.search(rf"micro_batch_size: {BATCH // 4} \({size}, fits\)", line), ended
    assert not (wide.root / "models/baseline").exists()


def test_halving_ends_well_and_the_result_says_so(wide: Repository, limit_bytes: int) -> None:
    wide.edit_params(lambda params: params["hardware"].update(on_out_of_memory="halve"))
    ended = train_within(wide, limit_bytes)
    assert ended.status == 0, ended
    training = json.loads((wide.root / "models/baseline/training.json").read_text())
    assert training["micro_batch_size"] < BATCH
    assert training["micro_batch_size"] * training["accumulation_steps"] == BATCH
    sizes = [event["micro_batch_size"] for event in training["out_of_memory"]]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == training["micro_batch_size"]
    assert training["steps"] == 4 and len(checkpoints(wide.root, "baseline")) == 1
