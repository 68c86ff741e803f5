import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.contenders.job import Job
from benchmarks.peer_environments import error_line, requirements
from benchmarks.peer_runs import Entry, Failure, Machine, environment_of, job_of, run, smaller
from benchmarks.peer_works import TECHNIQUES, WORKS, chosen

NAMES = ("W", "W2")


def job(contender: str = "trainer", switched: bool = True, work: str = "W", technique: str = "amp") -> Job:
    machine = Machine("cpu", 2, "medium", {}, Path(), 60.0, 1)
    return job_of(WORKS[work], TECHNIQUES[technique], Entry(contender, switched), machine, Path(), 1, 2)


def test_a_technique_of_several_micro_batches_has_their_global_batch_and_fewer_steps() -> None:
    technique = TECHNIQUES["amp_compile_accumulate"]
    assert job(technique=technique.name).global_batch_size == 32
    assert (technique.steps(10), technique.steps(8), technique.steps(1)) == (3, 2, 1)
    assert TECHNIQUES["amp"].steps(10) == 10


def test_the_next_smaller_micro_batch_keeps_the_global_batch() -> None:
    large = job(work="R")
    leaner = smaller(large, WORKS["R"])
    assert leaner == replace(large, micro_batch_size=32, accumulation_steps=2)
    assert smaller(replace(large, micro_batch_size=4, accumulation_steps=16), WORKS["R"]) is None
    assert smaller(job(), WORKS["W"]) is None


def test_a_contenders_environment_has_nothing_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("TORCH_LOGS", "all")
    monkeypatch.setenv("KEPT", "1")
    plain = environment_of(job(switched=False), Path("cache"))
    assert "OMP_WAIT_POLICY" not in plain
    assert "MALLOC_ARENA_MAX" not in plain
    assert "TORCH_LOGS" not in plain
    assert plain["KEPT"] == "1"
    assert plain["OMP_NUM_THREADS"] == "2"
    assert plain["TORCHINDUCTOR_CACHE_DIR"] == "cache"
    switched = environment_of(job(), Path("cache"))
    assert switched["OMP_WAIT_POLICY"] == "PASSIVE"
    own = environment_of(job("frugal"), Path("cache"))
    assert "OMP_WAIT_POLICY" not in own  # it sets its own


def test_a_contender_without_its_packages_is_a_failure_with_a_reason(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "half-written.so").touch()
    machine = Machine("cpu", 1, "medium", {"litgpt": Path(sys.executable)}, scratch, 60.0, 1)
    outcome = run(job("litgpt"), machine, cache)
    assert isinstance(outcome, Failure)
    assert outcome.reason == "ModuleNotFoundError: No module named 'lightning'"
    assert not outcome.out_of_memory
    assert "Traceback" in (tmp_path / "failed-litgpt.txt").read_text()
    assert not cache.exists()


def test_a_contender_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nsleep 60\n")
    sleeper.chmod(0o755)
    machine = Machine("cpu", 1, "medium", {"litgpt": sleeper}, scratch, 0.2, 1)
    assert run(job("litgpt"), machine, tmp_path / "cache") == Failure("not ready after 0 s")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "Traceback:\n  at x\ntorch._dynamo.exc.BackendError: no\n\nSet THIS for more\n",
            "torch._dynamo.exc.BackendError: no",
        ),
        ("warning\nERROR: No matching distribution\n", "ERROR: No matching distribution"),
        ("ValueError: a\nKeyError: 'b'\n", "KeyError: 'b'"),
        ("\n", "no message"),
    ],
)
def test_the_line_that_says_what_went_wrong(text: str, line: str) -> None:
    assert error_line(text) == line


def test_peers_are_installed_with_the_torch_that_runs_here() -> None:
    import torch

    wanted = requirements("trainer", "cpu")
    assert wanted[0] == f"torch=={torch.__version__.split('+')[0]}"
    assert not any("liger" in one for one in wanted)
    assert any(one.startswith("liger-kernel==") for one in requirements("trainer", "cuda"))


def test_chosen_names_keep_their_usual_order() -> None:
    assert chosen(" W2, W", NAMES, (), "--work") == ["W", "W2"]
    assert chosen(None, NAMES, ("W",), "--work") == ["W"]
    for given, words in (("W3", "--work W3: unknown"), (",", "--work is empty")):
        with pytest.raises(ValueError, match=f"{words}; use one or more of W, W2"):
            chosen(given, NAMES, (), "--work")
