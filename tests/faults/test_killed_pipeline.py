"""Whatever is killed, whenever: `dvc repro` goes on, and every result is the uninterrupted run's."""

import csv
import random
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.killed_pipeline import (
    HOWS,
    Account,
    How,
    Kill,
    kill_and_finish,
    result_hashes,
    run_to_end,
)
from tests.pipeline.small_repository import Repository, make_small_repository

pytestmark = pytest.mark.slow

STEPS = 300
FP16 = {"precision": "amp_fp16", "micro_batch_size": 2}

# Six that are seen coming, one way of dying each.
SIX = [
    Kill("tokenize", "tokenizing", "SIGKILL group"),
    Kill("train@baseline", "saving", "SIGKILL stage"),
    Kill("train@baseline", "published", "SIGKILL dvc"),
    Kill("train@fp16", "saved", "SIGKILL group"),
    Kill("train@fp16", "training", "SIGTERM stage"),
    Kill("evaluate@baseline", "any time", "SIGINT group"),
]
EAGER = ("starting", "saving", "saved", "training", "any time", "saving", "publishing", "half published")
COMPILED = ("any time", "saving", "training", "published")


def _repository(folder: Path, variants: dict[str, Any] | None) -> Repository:
    """Tokens, plans and models yet to be made; MLflow's schema is there."""
    repository = make_small_repository(folder / "repository")

    def edit(params: dict[str, Any]) -> None:
        params["training"] |= {"token_budget": 32 * 4 * STEPS, "log_every_steps": 10}
        params["checkpoints"] = {"every_steps": 20}
        params["variants"] = (variants or params["variants"]) | {"fp16": FP16}

    repository.edit_params(edit)
    repository.commit("many steps and checkpoints")
    repository.run("python", "-m", "stages.tracking.initialise")
    return repository


def _long_plan(order: list[str], chance: random.Random) -> list[Kill]:
    """Kills for all stages in the order in which DVC runs them, ways of dying evenly and shuffled."""
    moments: list[tuple[str, str]] = []
    for stage in order:
        name, _, variant = stage.partition("@")
        is_compiled = variant in ("compiled_accumulated", "frugal")
        if name == "tokenize":
            at: tuple[str, ...] = ("tokenizing", "tokenizing", "any time", "tokenized")
        elif name == "train":
            at = COMPILED if is_compiled else (*EAGER, "published")
        elif name == "evaluate":
            at = ("any time", "evaluated")
        else:
            at = ("any time",) if stage in ("compare", "plan@baseline") else ()
        moments += [(stage, moment) for moment in at]
    hows: list[How] = []
    for _ in range(-(-len(moments) // len(HOWS))):
        hows += chance.sample(HOWS, len(HOWS))
    return [Kill(stage, moment, how) for (stage, moment), how in zip(moments, hows, strict=False)]


def _run_both(
    base: Repository, folder: Path, plan: list[Kill] | None, seed: int
) -> tuple[Repository, Account]:
    """The reference and the killed run, each with a cache of its own: nothing is taken from the other's."""
    killed = base.copy_to(folder / "killed" / "repository")
    chance = random.Random(seed)
    with ThreadPoolExecutor(1) as beside:
        reference = beside.submit(run_to_end, base)
        # The long plan is made of the order in which DVC runs the stages.
        planned = _long_plan(reference.result(), chance) if plan is None else plan
        account = kill_and_finish(killed, planned, chance)
        order = reference.result()
    expected, found = result_hashes(base), result_hashes(killed)
    assert "is cached" not in account.log, "a result was taken from DVC's run cache"
    assert found.keys() == expected.keys() == set(order)
    assert sum(map(len, expected.values())) >= 6
    account.identical = [kill for kill in account.resumed if found[kill.stage] == expected[kill.stage]]
    differing = {
        path: [kill for kill in account.tried if kill.stage == stage]
        for stage in expected
        for path in expected[stage]
        if found[stage][path] != expected[stage][path]
    }
    assert not differing, f"{differing}\n{account.log}"
    return killed, account


def _check_mlflow(repository: Repository, variants: list[str]) -> None:
    """One run for each variant over all its starts, finished, with every row of the curve once."""
    with sqlite3.connect(f"file:{repository.root / 'mlflow.db'}?mode=ro", uri=True) as database:
        runs = database.execute(
            "SELECT v.value, f.value, r.status, r.run_uuid FROM runs r"
            " JOIN tags v ON v.run_uuid = r.run_uuid AND v.key = 'variant'"
            " JOIN tags f ON f.run_uuid = r.run_uuid AND f.key = 'fingerprint'"
        ).fetchall()
        (all_runs,) = database.execute("SELECT count(*) FROM runs").fetchone()
        doubled = database.execute(
            "SELECT run_uuid, key, step FROM metrics GROUP BY run_uuid, key, step HAVING count(*) > 1"
        ).fetchall()
        assert sorted(run[0] for run in runs) == sorted(variants) and all_runs == len(runs), runs
        assert {run[2] for run in runs} == {"FINISHED"}, runs
        assert doubled == []
        for variant, _, _, run in runs:
            points = database.execute(
                "SELECT step, value FROM metrics WHERE run_uuid = ? AND key = 'loss' ORDER BY step", (run,)
            ).fetchall()
            with (repository.root / f"results/curves/{variant}.csv").open() as file:
                curve = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
            assert [step for step, _ in curve] == list(range(10, STEPS + 1, 10))
            assert points == curve


def _check_nothing_half(repository: Repository) -> None:
    left = [path for path in repository.root.rglob("*.part") if ".dvc" not in path.parts]
    assert left == []
    assert list((repository.root / ".work/train").glob("*/*/.step-*")) == []


def _report(capsys: pytest.CaptureFixture[str], account: Account, seconds: float) -> None:
    with capsys.disabled():
        print(f"\n{account.summary()}\n  {seconds:.0f} s")


def test_six_kills_change_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = _repository(tmp_path, {"baseline": {"precision": "fp32", "micro_batch_size": 4}})
    started = time.monotonic()
    killed, account = _run_both(base, tmp_path, SIX, seed=1)
    _report(capsys, account, time.monotonic() - started)
    assert len(account.tried) >= 5, account.missed
    assert account.resumed == account.identical == account.tried
    assert account.from_checkpoint >= 2
    _check_mlflow(killed, ["baseline", "fp16"])
    _check_nothing_half(killed)


@pytest.mark.soak
def test_forty_kills_over_all_stages_and_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = _repository(tmp_path, None)
    started = time.monotonic()
    killed, account = _run_both(base, tmp_path, None, seed=4)
    _report(capsys, account, time.monotonic() - started)
    assert len(account.tried) >= 40, account.missed
    assert account.resumed == account.identical == account.tried
    _check_mlflow(killed, list(killed.params()["variants"]))
    _check_nothing_half(killed)
