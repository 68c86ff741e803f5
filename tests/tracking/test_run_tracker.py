"""The journal side: what the trainer calls, with no sending process and no mlflow."""

import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stages.tracking import append_to_run
from stages.tracking.journal import Journal, all_journals, newest_journal

pytestmark = pytest.mark.usefixtures("no_background")


@pytest.fixture
def journal(root: Path, fingerprint: str) -> Any:
    def newest() -> Journal:
        found = newest_journal(root / ".work", "baseline", fingerprint)
        assert found is not None
        return found

    return newest


def steps(journal: Journal, key: str = "loss") -> list[int]:
    return [r["step"] for r, _ in journal.read() if r["kind"] == "metrics" and key in r["metrics"]]


@pytest.mark.parametrize(
    ("exception", "status"),
    [
        (RuntimeError("loss is nan"), "FAILED"),
        (SystemExit(1), "FAILED"),
        (SystemExit("no such file"), "FAILED"),
        (SystemExit(75), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(), "FINISHED"),
    ],
)
def test_the_status_says_how_training_ended(
    tracker: Any, journal: Any, exception: BaseException, status: str
) -> None:
    with pytest.raises(type(exception)), tracker():
        assert journal().status() == "RUNNING"
        raise exception
    assert journal().status() == status
    errors = [r["tags"]["error"] for r, _ in journal().read() if "error" in r.get("tags", {})]
    assert errors == ([f"{type(exception).__name__}: {exception}"] if status == "FAILED" else [])


def test_a_resumed_run_has_each_step_once_for_each_metric(tracker: Any, journal: Any) -> None:
    with pytest.raises(KeyboardInterrupt), tracker() as run:
        for step in (10, 20, 30):
            run.log(step, {"loss": 1.0})
        run.log(20, {"grad_norm": 1.0})
        raise KeyboardInterrupt
    with tracker() as run:  # resumes from a checkpoint at step 10
        for step in (20, 30, 40):
            run.log(step, {"loss": 1.0, "grad_norm": 1.0})
    assert steps(journal()) == [10, 20, 30, 40]
    assert steps(journal(), "grad_norm") == [20, 30, 40]
    assert journal().folder.name == "1"
    assert journal().status() == "FINISHED"


def test_params_and_dataset_are_written_once_over_restarts(tracker: Any, journal: Any) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), tracker(params={"a": None, "b": True, "c": [1, 0.5]}):
            raise KeyboardInterrupt
    params = [record["params"] for record, _ in journal().read() if record["kind"] == "params"]
    assert params == [{"a": "null", "b": "true", "c": "[1, 0.5]"}]


def test_a_finished_run_is_continued_only_by_saved_progress(tracker: Any, journal: Any) -> None:
    with tracker() as run:
        run.log(10, {"loss": 1.0})
    with tracker(resumed=True):  # killed between its end and DVC's commit
        pass
    assert journal().folder.name == "1"
    with tracker() as run:  # dvc repro --force
        run.log(10, {"loss": 1.0})
    assert journal().folder.name == "2"
    assert steps(journal()) == [10]


def test_a_summary_is_put_at_the_last_step_and_repeated_only_when_it_changed(
    tracker: Any, journal: Any
) -> None:
    with tracker() as run:
        run.log(30, {"loss": 1.0})
        for value in (5.0, 5.0, 6.0, float("nan"), float("nan")):
            run.log_summary({"tokens_per_second": value, "mfu": None})
    assert steps(journal(), "tokens_per_second") == [30, 30, 30]
    assert steps(journal(), "mfu") == []


def test_later_stages_append_to_the_newest_run(
    tracker: Any, journal: Any, root: Path, fingerprint: str
) -> None:
    assert not append_to_run(root / ".work", "baseline", fingerprint, metrics={"bits_per_byte": 1.5})
    with tracker() as run:
        run.log(30, {"loss": 1.0})
    figure = root / "loss.png"
    figure.write_bytes(b"a figure")
    for _ in range(2):
        assert append_to_run(
            root / ".work",
            "baseline",
            fingerprint,
            metrics={"bits_per_byte": 1.5},
            tags={"md5.models/baseline": "abc.dir"},
            artifacts=[figure],
            folder="figures",
        )
    assert steps(journal(), "bits_per_byte") == [30]
    assert journal().status() == "FINISHED"
    figure.unlink()
    assert (journal().folder / "artifacts" / "figures" / "loss.png").read_bytes() == b"a figure"


def test_who_looks_at_the_journal_meanwhile_is_waited_for(
    tracker: Any, journal: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """`sync` holds the lock while it finds out whether a run is abandoned."""
    with tracker() as first:
        first.log(10, {"loss": 1.0})

    def go_on() -> None:
        with tracker(resumed=True) as second:
            second.log(20, {"loss": 0.5})

    with ThreadPoolExecutor(1) as others:
        with journal().locked("tracker.lock") as is_mine:
            assert is_mine
            going_on = others.submit(go_on)
            with pytest.raises(TimeoutError):
                going_on.result(0.3)
        going_on.result(60)
    assert steps(journal(), "loss") == [10, 20]
    assert "not tracked" not in capfd.readouterr().err


def test_a_second_tracker_of_the_same_run_leaves_it_alone(
    tracker: Any, journal: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.tracking.run_tracker._PATIENCE_SECONDS", 0.1)
    with tracker() as first:
        first.log(10, {"loss": 1.0})
        with tracker() as second:
            second.log(20, {"loss": 1.0})
            second.log_summary({"mfu": 0.5})
        assert journal().status() == "RUNNING"
        assert "another process tracks baseline-0123456789ab" in capfd.readouterr().err
    assert steps(journal()) == [10]


def test_training_goes_on_where_no_journal_can_be_made(
    tracker: Any, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (root / "file").write_text("")
    with tracker(work_root=root / "file") as run:
        run.log(10, {"loss": 1.0})
        run.log_artifacts([root / "file"])
        run.set_tags({"a": "b"})
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert "this run is not in MLflow; training is not affected" in warnings[0]


def test_a_full_disk_costs_no_point_once_there_is_room_again(
    tracker: Any, journal: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with tracker() as run:
            run.log(10, {"loss": 1.0})
            # Room for a part of the next line, as on a disk that fills up.
            resource.setrlimit(resource.RLIMIT_FSIZE, (journal().size_bytes + 20, limits[1]))
            run.log(20, {"loss": 1.0})
            run.log(30, {"loss": 1.0})
            assert steps(journal()) == [10]
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            run.log(40, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert steps(journal()) == [10, 20, 30, 40]
    assert journal().status() == "FINISHED"
    # The test's background process cannot start either: that is the first line, and the only one.
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_variants_have_journals_of_their_own(tracker: Any, root: Path) -> None:
    for variant in ("baseline", "amp-checkpointing"):
        with tracker(variant=variant):
            pass
    assert [journal.variant for journal in all_journals(root / ".work")] == ["amp-checkpointing", "baseline"]
