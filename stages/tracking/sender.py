"""Carries one journal to one MLflow store, in order, each point once however often it is interrupted.

Why nothing comes twice, though a process can die between sending and noting that it sent:
- the run carries its journal's id as a tag and is looked for by it before it is created;
- a metric point is sent with the time from the journal, and MLflow's SQL store has (run, key, time,
  step, value) as primary key and passes over what it has (`SqlAlchemyStore._log_metrics_once`);
- params, tags, dataset inputs, files and statuses overwrite themselves.
"""

import hashlib
import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from stages.tracking.journal import Journal, Record
from stages.tracking.sent import Sent, load_sent
from stages.tracking.store import Store, in_words, project_root

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

# mlflow/utils/validation.py
_METRICS_PER_BATCH = 1000
_PARAMS_OR_TAGS_PER_BATCH = 100
_KEY_LENGTH = 250
_PARAM_LENGTH = 6000
_TAG_LENGTH = 8000
_DIGEST_LENGTH = 36

JOURNAL_TAG = "journal"
WORKPLACE_TAG = "workplace"


class NotSent(RuntimeError):
    """What remains of a journal could not be sent now; the message says why in one line."""


class Sender:
    """Sends one journal; `connect` is called when there is no connection yet."""

    def __init__(self, journal: Journal, store: Store, connect: Callable[[Store], "MlflowClient"]) -> None:
        self._journal = journal
        self._store = store
        self._connect = connect
        self._sent = Sent(store.name)
        self._has_seen_run = False

    @cached_property
    def _client(self) -> "MlflowClient":
        return self._connect(self._store)

    @property
    def _run_id(self) -> str:
        assert self._sent.run_id is not None
        return self._sent.run_id

    def send(self, patience_seconds: float = 0) -> None:
        """Send what is not there yet; NotSent with the reason where that fails."""
        with self._journal.locked("sender.lock", patience_seconds) as is_mine:
            if not is_mine:
                raise NotSent("another process is sending it")
            self._journal.fsync()
            self._sent = load_sent(self._journal, self._store.name)
            try:
                self._send_from_offset()
                self._sent.problem = None
            except Exception as error:
                # Whatever a client, a database or a network can throw: it is for later.
                self._sent.problem = in_words(error)
                raise NotSent(self._sent.problem) from error
            finally:
                self._sent.save(self._journal)

    def _send_from_offset(self) -> None:
        if not self._has_seen_run:
            self._find_or_create_run()
            self._has_seen_run = True
        if self._sent.is_deleted:
            return
        for records, end in _batches(self._journal.read(self._sent.offset)):
            self._send_records(records)
            self._sent.offset = end
            self._sent.save(self._journal)
        self._send_artifacts()

    def _find_or_create_run(self) -> None:
        from mlflow.exceptions import MlflowException

        if self._sent.run_id is not None:
            try:
                run = self._client.get_run(self._sent.run_id)
                self._sent.is_deleted = run.info.lifecycle_stage == "deleted"
                return
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            self._sent.forget_run()
        first, _ = next(self._journal.read())
        experiment_id = self._experiment_id(first["experiment"])
        if found := self._find_run(first, experiment_id):
            run_id = found.info.run_id
            self._sent.already_there = {
                key: max(point.step for point in self._client.get_metric_history(run_id, key))
                for key in found.data.metrics
            }
            self._client.set_tag(run_id, JOURNAL_TAG, first["journal"])
        else:
            tags = {
                "variant": first["variant"],
                "fingerprint": first["fingerprint"],
                JOURNAL_TAG: first["journal"],
                WORKPLACE_TAG: _workplace(),
            }
            made = self._client.create_run(experiment_id, first["time"], tags, run_name=first["variant"])
            run_id = made.info.run_id
        self._sent.run_id = run_id
        self._sent.save(self._journal)

    def _find_run(self, first: Record, experiment_id: str) -> "Run | None":
        """The run of this journal; else one that a lost journal of this workplace left unfinished."""
        searches = [f"tags.{JOURNAL_TAG} = '{first['journal']}'"]
        if self._journal.is_first_of_its_fingerprint:
            searches.append(
                f"tags.fingerprint = '{first['fingerprint']}' and tags.{WORKPLACE_TAG} = '{_workplace()}' "
                "and attributes.status != 'FINISHED'"
            )
        for search in searches:
            found = self._client.search_runs(
                [experiment_id], search, max_results=1, order_by=["attributes.start_time DESC"]
            )
            if found:
                return found[0]
        return None

    def _experiment_id(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        if (experiment := self._client.get_experiment_by_name(name)) is None:
            try:
                return self._client.create_experiment(name, artifact_location=self._store.artifact_location)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = self._client.get_experiment_by_name(name)  # another process was first
        if experiment is None or experiment.lifecycle_stage == "deleted":
            raise NotSent(
                f"the experiment {name} is deleted in MLflow; restore it, or rename tracking.experiment"
            )
        return experiment.experiment_id

    def _send_records(self, records: list[Record]) -> None:
        from mlflow.entities import Param, RunTag

        record = records[0]
        match record["kind"]:
            case "metrics":
                self._log_batch("metrics", list(self._points(records)), _METRICS_PER_BATCH)
            case "params":
                params = [Param(_key(k), _cut(v, _PARAM_LENGTH)) for k, v in record["params"].items()]
                self._log_batch("params", params, _PARAMS_OR_TAGS_PER_BATCH)
            case "tags":
                tags = [RunTag(_key(k), _cut(v, _TAG_LENGTH)) for k, v in record["tags"].items()]
                self._log_batch("tags", tags, _PARAMS_OR_TAGS_PER_BATCH)
            case "dataset":
                self._log_dataset(record["dataset"])
            case "artifact":
                self._sent.artifacts_left.append(record)
            case "status" if record["status"] == "RUNNING":
                self._client.update_run(self._run_id, status="RUNNING")
            case "status":
                self._client.set_terminated(self._run_id, record["status"], record["time"])

    def _points(self, records: list[Record]) -> Iterator["Metric"]:
        from mlflow.entities import Metric

        for record in records:
            for key, value in record["metrics"].items():
                if record["step"] > self._sent.already_there.get(_key(key), -1):
                    yield Metric(_key(key), value, record["time"], record["step"])

    def _log_batch(self, what: str, items: list[Any], at_most: int) -> None:
        """Send in parts. What MLflow refuses is sent by halves, down to the one item that is wrong."""
        for start in range(0, len(items), at_most):
            part = items[start : start + at_most]
            batch: dict[str, Any] = {what: part}
            if self._is_refused(partial(self._client.log_batch, self._run_id, **batch)):
                if len(part) == 1:
                    _say_left_out(f"{what} {part[0]}")
                else:
                    self._log_batch(what, part, (len(part) + 1) // 2)

    def _is_refused(self, send: Callable[[], object]) -> bool:
        """True where MLflow will not have it: it would not the next time either, and would hold up all
        that follows. Other failures are raised."""
        from mlflow.exceptions import MlflowException

        try:
            send()
        except MlflowException as error:
            if error.error_code not in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                raise
            self._raise_if_deleted()
            return True
        return False

    def _raise_if_deleted(self) -> None:
        """MLflow refuses a deleted run's data in the same words as wrong data."""
        run = self._client.get_run(self._run_id)
        if run.info.lifecycle_stage == "deleted":
            self._sent.is_deleted = True
            raise NotSent("the run was deleted in MLflow")

    def _log_dataset(self, fields: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=_cut(fields["name"], 500),
            digest=fields["sha256"][:_DIGEST_LENGTH],
            source_type="local",
            source=json.dumps({"uri": fields["source"]}),
            profile=json.dumps(fields["profile"]),
        )
        context = InputTag("mlflow.data.context", "training")
        inputs = [DatasetInput(dataset, [context])]
        if self._is_refused(partial(self._client.log_inputs, self._run_id, inputs)):
            _say_left_out(f"dataset {fields['name']}")

    def _send_artifacts(self) -> None:
        problems = []
        for record in list(self._sent.artifacts_left):
            path = self._journal.folder / record["file"]  # an absolute file stays itself
            try:
                if path.exists():
                    self._client.log_artifact(self._run_id, str(path), record["folder"] or None)
                else:
                    _say_left_out(f"artifact {path.name}, which is gone")
                self._sent.artifacts_left.remove(record)
                self._sent.save(self._journal)
            except Exception as error:  # any store of files, any failure: for later
                problems.append(f"{path.name} could not be attached: {in_words(error)}")
        if problems:
            raise NotSent("; ".join(problems))


def _batches(records: Iterator[tuple[Record, int]]) -> Iterator[tuple[list[Record], int]]:
    """Consecutive metrics together, up to what MLflow takes in one request; all else by itself."""
    batch: list[Record] = []
    points, batch_end = 0, 0
    for record, end in records:
        is_metrics = record["kind"] == "metrics"
        more = len(record["metrics"]) if is_metrics else 0
        if batch and (not is_metrics or points + more > _METRICS_PER_BATCH):
            yield batch, batch_end
            batch, points = [], 0
        if is_metrics:
            batch.append(record)
            points, batch_end = points + more, end
        else:
            yield [record], end
    if batch:
        yield batch, batch_end


def _say_left_out(what: str) -> None:
    print(f"tracking: left out, because MLflow cannot take it: {what}", file=sys.stderr, flush=True)


def _key(key: str) -> str:
    """A name MLflow accepts: letters, digits and _ - . / space."""
    return re.sub(r"[^\w\-. /]", "_", key, flags=re.ASCII)[:_KEY_LENGTH]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _workplace() -> str:
    """Says "this machine and this repository" without naming either on a shared server."""
    return hashlib.sha256(f"{socket.gethostname()}:{project_root()}".encode()).hexdigest()[:12]
