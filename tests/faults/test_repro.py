"""`python -m stages.repro`: what `make repro` and the container run, stopped and killed."""

import fcntl
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from stages.container_image import ContainerImageError, check_constraints
from stages.repro import share_checkout
from tests.faults.stage_process import StageProcess, results
from tests.pipeline.small_repository import SOURCE, Repository

EVERY_SIGNAL = pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name
)
AGAIN = "run it again, it goes on from there"


@pytest.fixture
def baseline_only(repository: Repository) -> Repository:
    repository.keep_variants("baseline")
    return repository


@pytest.mark.slow
@EVERY_SIGNAL
def test_a_stop_in_training_saves_it_and_the_next_start_goes_on(
    baseline_only: Repository, uninterrupted: dict[str, str], number: signal.Signals
) -> None:
    process = StageProcess(baseline_only, "repro")
    process.wait_for(".work/train/baseline/*/step-*")
    process.send(number)
    ended = process.end()
    assert ended.status == 75, ended
    assert re.search(
        r"^train baseline: stopped by SIG\w+ after step \d+ of 600, saved", ended.stderr, re.M
    ), ended
    assert ended.stderr.endswith(f"repro: stopped by {number.name}; {AGAIN}\n"), ended
    assert not (baseline_only.root / "models/baseline").exists()

    ended = StageProcess(baseline_only, "repro", "train@baseline").end()
    assert ended.status == 0 and "going on after step" in ended.stdout, ended
    assert "evaluate@baseline" not in ended.stdout, "arguments are those of dvc repro"
    assert results(baseline_only.root, "baseline") == uninterrupted


@pytest.mark.slow
def test_a_stop_that_comes_before_a_stage_has_a_handler_is_not_lost(baseline_only: Repository) -> None:
    """DVC has started the stage, whose interpreter still imports: SIGTERM is ignored there, as by DVC."""
    process = StageProcess(baseline_only, "repro")
    output = Path(process._outputs[0])
    while "Running stage 'plan@baseline'" not in output.read_text():
        process.wait_for("dvc.yaml", after_seconds=0.002)
    process.send(signal.SIGTERM)
    ended = process.end()
    assert ended.status == 75, ended
    assert "plan baseline: stopped by SIGTERM; it is not complete" in ended.stderr, ended
    assert ended.stdout.count("Running stage") == 2, "tokenize and plan; nothing after the stop"


@pytest.mark.slow
def test_a_failure_is_not_taken_for_a_stop(baseline_only: Repository) -> None:
    (baseline_only.root / "corpus/00.txt").write_bytes(b"\xff\xfe\xff")
    ended = StageProcess(baseline_only, "repro", "--force").end()
    assert ended.status not in (0, 75) and "00.txt" in ended.stderr, ended
    assert AGAIN not in ended.stderr


def test_what_cannot_run_is_said_before_anything_runs(baseline_only: Repository) -> None:
    baseline_only.edit_params(lambda params: params["hardware"].update(device="gpu"))
    ended = StageProcess(baseline_only, "repro").end()
    assert ended.status == 1 and "hardware.device" in ended.stderr, ended
    assert "Running stage" not in ended.stdout and "Traceback" not in ended.stderr


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a container of the project, after one that was killed while it wrote data/tokens; its process had
    the id that this test has."""
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    holder = {"pid": os.getpid(), "cmd": "dvc repro"}
    (tmp_path / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {"data/tokens": holder}, "read": {}}))
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.setenv("FRUGAL_SOURCE", str(SOURCE))
    return tmp_path


def test_the_lock_of_a_killed_container_is_removed(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with share_checkout(checkout):
        assert not (checkout / ".dvc/tmp/rwlock").exists()
    assert "removed .dvc/tmp/rwlock" in capsys.readouterr().err


def test_a_half_written_lock_is_removed(checkout: Path) -> None:
    (checkout / ".dvc/tmp/rwlock").write_text('{"write": {"data')
    with share_checkout(checkout):
        assert not (checkout / ".dvc/tmp/rwlock").exists()


def test_a_lock_that_names_nobody_stays(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / ".dvc/tmp/rwlock").write_text('{"write": {}, "read": {}}')
    with share_checkout(checkout):
        assert (checkout / ".dvc/tmp/rwlock").exists()
    assert capsys.readouterr().err == ""


def test_the_lock_stays_where_another_container_shares_the_checkout(checkout: Path) -> None:
    with share_checkout(checkout):
        (checkout / ".dvc/tmp/rwlock").write_text('{"write": {"models/a": {"pid": 7, "cmd": "dvc repro"}}}')
        with share_checkout(checkout):
            assert (checkout / ".dvc/tmp/rwlock").exists()
    with share_checkout(checkout):
        assert not (checkout / ".dvc/tmp/rwlock").exists()


def test_the_lock_stays_where_a_training_holds_its_work_folder(checkout: Path) -> None:
    folder = checkout / ".work/train/baseline/0123456789abcdef"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with share_checkout(checkout):
            assert (checkout / ".dvc/tmp/rwlock").exists()
    with share_checkout(checkout):
        assert not (checkout / ".dvc/tmp/rwlock").exists()


def test_outside_of_a_container_dvc_looks_after_its_locks(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FRUGAL_SOURCE")
    with share_checkout(checkout):
        assert (checkout / ".dvc/tmp/rwlock").exists()


def test_an_image_of_other_versions_is_refused(tmp_path: Path) -> None:
    source, checkout = tmp_path / "source", tmp_path / "checkout"
    for folder in (source, checkout):
        folder.mkdir()
        (folder / "constraints.txt").write_text("torch==2.13.0\n")
    environment = {"FRUGAL_SOURCE": str(source), "FRUGAL_GIT_COMMIT": "abc123"}
    check_constraints(checkout, environment)
    (checkout / "constraints.txt").write_text("torch==2.14.0\n")
    with pytest.raises(ContainerImageError, match=r"other versions than this image has; build .* \(abc123\)"):
        check_constraints(checkout, environment)
    check_constraints(checkout, {})


def test_it_holds_no_torch_and_no_mlflow_beside_the_stages(repository: Repository) -> None:
    command = (
        "import sys, stages.repro; print(*sorted({'torch', 'mlflow', 'dvc', 'numpy'} & set(sys.modules)))"
    )
    assert repository.run(sys.executable, "-c", command).stdout == "\n"
