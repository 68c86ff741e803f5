"""Training by two ranks as a whole stage: real processes, killed, stopped and gone on."""

import csv
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.params import ParamsError, load_params
from stages.train import main
from stages.train_ranks import with_ranks
from stages.training.ranks import Ranks
from tests.faults.stage_process import Ended, StageProcess, checkpoints, results
from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow

STEPS = 100
_GOES_ON = "`dvc repro` goes on from the last checkpoint"
_TOLD = "SIGTERM: finishing the micro-batch and saving; again to stop at once"


def set_ranks(repository: Repository, ranks: int, parallelism: str = "ddp") -> None:
    def edit(params: dict[str, Any]) -> None:
        params["training"]["ranks"] = ranks
        params["variants"]["baseline"]["parallelism"] = parallelism

    repository.edit_params(edit)


@pytest.fixture(scope="module")
def short(tokenized: Repository, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Fewer steps, two micro-batches a step. Only to be read."""
    repository = tokenized.copy_to(tmp_path_factory.mktemp("short") / "repository")

    def edit(params: dict[str, Any]) -> None:
        params["training"]["token_budget"] = 32 * 4 * STEPS
        params["checkpoints"] = {"every_steps": 20}
        params["variants"] = {"baseline": {"precision": "fp32", "micro_batch_size": 2}}

    repository.edit_params(edit)
    return repository


@pytest.fixture
def repository(short: Repository, tmp_path: Path) -> Iterator[Repository]:
    """To be changed. No process of it is left when its test is over."""
    repository = short.copy_to(tmp_path / "repository")
    yield repository
    left = processes(repository)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert left == {}


def complete(
    short: Repository, tmp_path_factory: pytest.TempPathFactory, ranks: int, parallelism: str
) -> Repository:
    repository = short.copy_to(tmp_path_factory.mktemp("complete") / "repository")
    set_ranks(repository, ranks, parallelism)
    ended = start(repository).end()
    assert ended.status == 0 and ended.errors() == [], ended
    # It is off; every rank that talked to it would say so.
    assert ended.stderr.count("tracking: ") == 1 and ended.stdout.count("tokens/s") == 1, ended
    assert processes(repository) == {}
    return repository


@pytest.fixture(scope="module")
def alone(short: Repository, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """After an uninterrupted training by one rank. Only to be read, as the two below."""
    return complete(short, tmp_path_factory, 1, "ddp")


@pytest.fixture(scope="module")
def ddp(short: Repository, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return complete(short, tmp_path_factory, 2, "ddp")


@pytest.fixture(scope="module")
def fsdp(short: Repository, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return complete(short, tmp_path_factory, 2, "fsdp")


def start(repository: Repository, *prefix: str) -> StageProcess:
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return StageProcess(repository, "train", "baseline", prefix=prefix, environment=environment)


def start_and_see_checkpoint(repository: Repository) -> StageProcess:
    """Until this start has written one."""
    before = set(checkpoints(repository.root, "baseline"))
    process = start(repository)
    deadline = time.monotonic() + 240
    while set(checkpoints(repository.root, "baseline")) <= before:
        assert process.process.poll() is None, process.end()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return process


def processes(repository: Repository) -> dict[int, str | None]:
    """Those whose working folder is the repository: the rank by process number, None for who is none."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cwd").readlink() != repository.root:
                continue
            variables = dict(
                pair.split("=", 1) for pair in (folder / "environ").read_text().split("\0") if "=" in pair
            )
        except OSError:  # ended meanwhile
            continue
        found[int(folder.name)] = variables.get("RANK")
    return found


def kill_rank(repository: Repository, rank: int, number: signal.Signals) -> None:
    (process,) = (process for process, its in processes(repository).items() if its == str(rank))
    os.kill(process, number)


def steps_gone_on_after(ended: Ended) -> list[int]:
    return [int(step) for step in re.findall(rf"going on after step (\d+) of {STEPS}", ended.stdout)]


def stopped_after(repository: Repository, ended: Ended, *, told_by: str | None) -> int:
    """The step that a training saved when it was told to stop, from its last line.

    Args:
        told_by: the line before it, the only other one; None: there is none.
    """
    assert ended.status == 75, ended
    *before, last = ended.errors()
    assert before == ([] if told_by is None else [told_by]), ended
    told = re.fullmatch(
        rf"train baseline: stopped by SIGTERM after step (\d+) of {STEPS}, saved; `dvc repro` goes on from "
        "there",
        last,
    )
    assert told, ended
    assert f"step-{int(told[1]):09}" in checkpoints(repository.root, "baseline")
    return int(told[1])


def curve(repository: Repository) -> list[list[float]]:
    with (repository.root / "results/curves/baseline.csv").open() as file:
        return [[float(value) for value in row] for row in list(csv.reader(file))[1:]]


def has_curve_of(repository: Repository, other: Repository) -> bool:
    rows, expected = curve(repository), curve(other)
    assert len(expected) == STEPS // 10
    return rows == [pytest.approx(row, rel=1e-5) for row in expected]


def facts(repository: Repository) -> dict[str, Any]:
    return json.loads((repository.root / "models/baseline/training.json").read_text())


def tensors(repository: Repository) -> dict[str, dict[str, tuple[torch.dtype, torch.Size]]]:
    """Type and shape of each, by file."""
    files = sorted((repository.root / "models/baseline").glob("*.safetensors"))
    return {
        file.name: {name: (tensor.dtype, tensor.shape) for name, tensor in load_file(file).items()}
        for file in files
    }


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_two_ranks_end_where_one_does(
    alone: Repository, parallelism: str, request: pytest.FixtureRequest
) -> None:
    together: Repository = request.getfixturevalue(parallelism)
    assert has_curve_of(together, alone)
    names = {path.name for path in (alone.root / "models/baseline").iterdir()}
    assert {path.name for path in (together.root / "models/baseline").iterdir()} == names
    assert tensors(together) == tensors(alone)
    assert "model.layers.0.self_attn.q_proj.weight" in tensors(together)["model.safetensors"]
    assert facts(together)["ranks"] == [{"after_step": 0, "ranks": 2, "parallelism": parallelism}]
    for key in ("fingerprint", "tokens", "steps", "parameters"):
        assert facts(together)[key] == facts(alone)[key]


def test_a_stop_of_all_and_of_one_is_saved_once_and_changes_no_byte(
    repository: Repository, ddp: Repository
) -> None:
    set_ranks(repository, 2)
    process = start_and_see_checkpoint(repository)
    process.send(signal.SIGTERM)  # to the launcher
    first = stopped_after(repository, process.end(), told_by=_TOLD)

    process = start_and_see_checkpoint(repository)
    kill_rank(repository, 1, signal.SIGTERM)
    ended = process.end()
    second = stopped_after(repository, ended, told_by=None)
    assert steps_gone_on_after(ended) == [first] and first < second < STEPS

    ended = start(repository).end()
    assert ended.status == 0 and steps_gone_on_after(ended) == [second], ended
    assert results(repository.root, "baseline") == results(ddp.root, "baseline")


def test_a_training_goes_on_with_more_and_with_fewer_ranks(repository: Repository, alone: Repository) -> None:
    """One rank, then two of which one is killed, then one again."""
    process = start_and_see_checkpoint(repository)
    process.send(signal.SIGTERM)
    first = stopped_after(repository, process.end(), told_by=_TOLD)

    set_ranks(repository, 2, "fsdp")
    process = start_and_see_checkpoint(repository)
    kill_rank(repository, 1, signal.SIGKILL)
    ended = process.end()
    assert ended.status == 1 and steps_gone_on_after(ended) == [first], ended
    assert ended.errors() == [
        f"train baseline: rank 1 of 2 was killed by SIGKILL (out of host memory?); {_GOES_ON}"
    ]
    assert processes(repository) == {}

    set_ranks(repository, 1)
    ended = start(repository).end()
    assert ended.status == 0 and ended.errors() == [], ended
    (second,) = steps_gone_on_after(ended)
    assert first < second < STEPS
    assert has_curve_of(repository, alone)
    assert facts(repository)["ranks"] == [
        {"after_step": 0, "ranks": 1, "parallelism": "ddp"},
        {"after_step": first, "ranks": 2, "parallelism": "fsdp"},
        {"after_step": second, "ranks": 1, "parallelism": "ddp"},
    ]


def test_torchrun_restarts_a_killed_rank(repository: Repository, fsdp: Repository) -> None:
    """What the user's own agent runs is the same stage; its number of ranks counts."""
    set_ranks(repository, 1, "fsdp")
    agent = "python -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 --no-python"
    process = start(repository, *agent.split())
    process.wait_for_checkpoint()
    kill_rank(repository, 1, signal.SIGKILL)
    ended = process.end()
    assert ended.status == 0 and len(steps_gone_on_after(ended)) == 1, ended
    assert results(repository.root, "baseline") == results(fsdp.root, "baseline")


def test_a_bad_number_is_placed_in_its_rank_and_told_once(repository: Repository) -> None:
    repository.edit_params(lambda params: params["training"].update(learning_rate=1e30))
    set_ranks(repository, 2)
    ended = start(repository).end()
    assert ended.status == 1, ended
    (line,) = ended.errors()
    told = re.fullmatch(
        r"train baseline: step (\d+): (?:the loss is (?:nan|inf)|a gradient is no number) in "
        r"micro-batch 1 of 1 of rank [01], sequences \d+, \d+ of the train split; the weights are those of "
        r"step (\d+)\. Lower training\.learning_rate, or leave such batches out with training\.max_bad_steps",
        line,
    )
    assert told and int(told[1]) == int(told[2]) + 1, ended


def test_everyones_mistake_is_told_once_and_of_no_rank(repository: Repository) -> None:
    set_ranks(repository, 2)
    (repository.root / "data/tokens/train.safetensors").unlink()
    ended = start(repository).end()
    assert ended.status == 1, ended
    assert ended.errors() == [
        "train baseline: data/tokens/train.safetensors: no such file; run the tokenize stage"
    ]


def test_a_batch_that_the_ranks_do_not_divide_is_refused(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = "  training.ranks: 3 does not divide training.global_batch_size 4; use 1, 2 or 4"
    monkeypatch.chdir(repository.root)
    with pytest.raises(ParamsError) as refused:
        with_ranks(load_params(), "baseline", Ranks(rank=0, count=3, local_rank=0, local_count=3))
    assert str(refused.value).splitlines() == ["with 3 ranks, as torchrun has it: 1 problem", problem]

    # Where torchrun has two, and the params one.
    repository.edit_params(lambda params: params["hardware"].update(on_out_of_memory="halve"))
    with pytest.raises(ParamsError, match="halve is for one rank"):
        with_ranks(load_params(), "baseline", Ranks(rank=0, count=2, local_rank=0, local_count=2))
    repository.edit_params(lambda params: params["hardware"].update(on_out_of_memory="stop"))

    set_ranks(repository, 3)
    assert main(["baseline"]) == 1
    assert problem in capsys.readouterr().err.splitlines()
