"""What the stages call: `RunTracker` around a training, `append_to_run` for what follows it.

Nothing here raises for a full disk or a dead server: tracking never stops training. One line on
stderr says what is wrong, once.
"""

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stages.tracking.background import BackgroundSender
from stages.tracking.journal import Journal, Record, newest_journal, now_ms, start_journal
from stages.tracking.sent import load_sent, register
from stages.tracking.store import store_from_environment

_PATIENCE_SECONDS = 10.0
"""For a lock that others hold while they read a journal."""

EXIT_INTERRUPTED = 75
"""Exit status of a stage that was told to stop and can be continued (EX_TEMPFAIL)."""

_COPY_AT_MOST_BYTES = 32 * 2**20
# The sender goes on without us, so this is only for the run to be whole in MLflow, most times, when the
# stage ends. Who is told to stop has seconds to live and does not wait.
_WAIT_AT_THE_END_SECONDS = 3.0
_WAIT_WHEN_KILLED_SECONDS = 0.5


@dataclass(frozen=True)
class TokensDataset:
    """What was trained on, as MLflow's dataset input; names it and loads nothing."""

    name: str
    sha256: str
    """Of the text or of the token files."""
    source: str
    """Where it came from: a package and version, globs, a hub dataset and revision."""
    profile: Mapping[str, int | float | str]
    """Counts to show beside it, such as {"train_tokens": 2500000}."""


class RunTracker:
    """Tracks one training. A restart continues the run it left; a finished run is never touched again.

    Points at or before the last step in the journal are dropped, metric by metric, so a caller that
    replays steps after a resume (or passes the whole curve again) makes no point twice.
    """

    def __init__(
        self,
        work_root: Path,
        variant: str,
        fingerprint: str,
        experiment: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        dataset: TokensDataset | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        """`resumed`: the training continues saved progress, so even a run that says FINISHED is the
        same one (killed between its end and DVC's commit); otherwise that one is left and a new
        one begun."""
        self._work_root, self._variant, self._fingerprint = work_root, variant, fingerprint
        self._experiment, self._resumed = experiment, resumed
        self._params = {key: _param_text(value) for key, value in params.items()}
        self._tags = dict(tags or {})
        self._dataset = dataset
        self._journal: Journal | None = None
        self._last: dict[str, tuple[int, float]] = {}
        self._unwritten: list[Record] = []
        self._sender: BackgroundSender | None = None
        self._held = contextlib.ExitStack()
        self._has_warned = False

    def __enter__(self) -> Self:
        try:
            self._open()
        except OSError as error:
            self._warn(f"no journal can be written ({error}), so this run is not in MLflow")
        return self

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Points of the curves at an optimizer step; None is left out. Tens of microseconds."""
        new = {
            key: float(value)
            for key, value in metrics.items()
            if value is not None and (key not in self._last or step > self._last[key][0])
        }
        if new:
            self._last |= {key: (step, value) for key, value in new.items()}
            self._write({"kind": "metrics", "time": now_ms(), "step": step, "metrics": new})

    def log_summary(self, metrics: Mapping[str, float | None]) -> None:
        """Single numbers about the whole run, at its last step; a value already there is not repeated."""
        if record := _summary(metrics, self._last):
            self._write(record)

    def log_artifacts(self, paths: Iterable[Path], folder: str = "") -> None:
        """Attach files, under `folder` in MLflow. Small ones are copied now, others read when sent."""
        if self._journal is not None:
            for path in paths:
                try:
                    self._write(_keep_artifact(self._journal, path, folder))
                except OSError as error:
                    self._warn(f"{path} is not attached: {error.strerror or error}")

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._write({"kind": "tags", "tags": dict(tags)})

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        status = _status_after(exception)
        if status == "FAILED":
            self.set_tags({"error": f"{type(exception).__name__}: {exception}"[:1000]})
        self._write({"kind": "status", "status": status, "time": now_ms()})
        if self._unwritten:
            self._warn("the last records of this run could not be written to its journal")
        try:
            self._finish_sending(status)
        finally:
            self._held.close()
            if self._journal is not None:
                self._journal.close()

    def _open(self) -> None:
        journal = newest_journal(self._work_root, self._variant, self._fingerprint)
        if journal is None or (journal.status() == "FINISHED" and not self._resumed):
            journal = start_journal(self._work_root, self._variant, self._fingerprint, self._experiment)
        # Not at once: who looks whether a run is abandoned holds the lock for a moment too.
        if not self._held.enter_context(journal.locked("tracker.lock", _PATIENCE_SECONDS)):
            self._warn(f"another process tracks {journal.name}; this one is not tracked")
            return
        known_params, self._last, has_dataset = _index(journal)
        new_params = {key: text for key, text in self._params.items() if key not in known_params}
        records: list[Record] = [{"kind": "status", "status": "RUNNING", "time": now_ms()}]
        if new_params:
            records.append({"kind": "params", "params": new_params})
        if self._tags:
            records.append({"kind": "tags", "tags": self._tags})
        if self._dataset is not None and not has_dataset:
            fields = asdict(self._dataset) | {"profile": dict(self._dataset.profile)}
            records.append({"kind": "dataset", "dataset": fields})
        journal.append(*records)
        register(journal, store_from_environment().name)
        self._journal = journal
        try:
            self._sender = BackgroundSender(journal)
        except OSError as error:
            self._warn(f"the sending process did not start ({error}); the journal is kept")

    def _write(self, record: Record) -> None:
        if self._journal is None:
            return
        self._unwritten.append(record)
        try:
            self._journal.append(*self._unwritten)
            self._unwritten.clear()
        except OSError as error:
            self._warn(f"the journal cannot be written for now ({error.strerror or error})")

    def _finish_sending(self, status: str) -> None:
        if self._journal is None or self._sender is None:
            return
        wait_seconds = _WAIT_WHEN_KILLED_SECONDS if status == "KILLED" else _WAIT_AT_THE_END_SECONDS
        is_sent = self._sender.finish(wait_seconds)
        store = store_from_environment()
        problem = None if is_sent else load_sent(self._journal, store.name).problem
        if is_sent is False:
            problem = problem or f"the sending process ended early, see {self._journal.folder}/sender.log"
        if problem:
            self._warn(f"{self._variant} is not all in {store.name}: {problem}", again=True)

    def _warn(self, message: str, again: bool = False) -> None:
        if again or not self._has_warned:
            self._has_warned = True
            advice = "training is not affected; `python -m stages.tracking.sync` sends what is missing"
            print(f"tracking: {message}; {advice}", file=sys.stderr, flush=True)


def append_to_run(
    work_root: Path,
    variant: str,
    fingerprint: str,
    *,
    metrics: Mapping[str, float | None] | None = None,
    tags: Mapping[str, str] | None = None,
    artifacts: Iterable[Path] = (),
    folder: str = "",
) -> bool:
    """Add to the newest run of this variant and fingerprint, from a later stage; `sync` sends it.

    False when there is no such run here: DVC's run cache restored the model, or the work folder is
    gone. OSError when the journal cannot be written.
    """
    journal = newest_journal(work_root, variant, fingerprint)
    if journal is None:
        return False
    _, last, _ = _index(journal)
    records = [_keep_artifact(journal, path, folder) for path in artifacts]
    if summary := _summary(metrics or {}, last):
        records.append(summary)
    if tags:
        records.append({"kind": "tags", "tags": dict(tags)})
    if records:
        journal.append(*records)
    register(journal, store_from_environment().name)
    journal.close()
    return True


def _index(journal: Journal) -> tuple[set[str], dict[str, tuple[int, float]], bool]:
    """What a journal holds: names of params, the last (step, value) of each metric, any dataset."""
    params: set[str] = set()
    last: dict[str, tuple[int, float]] = {}
    has_dataset = False
    for record, _ in journal.read():
        match record["kind"]:
            case "params":
                params |= record["params"].keys()
            case "metrics":
                last |= {key: (record["step"], value) for key, value in record["metrics"].items()}
            case "dataset":
                has_dataset = True
    return params, last, has_dataset


def _summary(metrics: Mapping[str, float | None], last: dict[str, tuple[int, float]]) -> Record | None:
    """The record of those values that differ from the ones there; `last` is brought up to date."""
    step = max((step for step, _ in last.values()), default=0)
    values = {key: float(value) for key, value in metrics.items() if value is not None}
    new = {key: value for key, value in values.items() if key not in last or not _same(last[key][1], value)}
    last |= {key: (step, value) for key, value in new.items()}
    return {"kind": "metrics", "time": now_ms(), "step": step, "metrics": new} if new else None


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _keep_artifact(journal: Journal, path: Path, folder: str) -> Record:
    """Copy a small file beside the journal, so that it is still there when it can be sent."""
    size = path.stat().st_size
    if size > _COPY_AT_MOST_BYTES:
        return {"kind": "artifact", "file": str(path.resolve()), "folder": folder}
    place = journal.folder / "artifacts" / folder / path.name
    place.parent.mkdir(parents=True, exist_ok=True)
    half = place.with_name(f".{place.name}.part")
    shutil.copyfile(path, half)
    half.replace(place)
    file = place.relative_to(journal.folder)
    return {"kind": "artifact", "file": str(file), "folder": folder}


def _param_text(value: Any) -> str:
    """As params.yaml would write it: null, true, 0.004."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _status_after(exception: BaseException | None) -> str:
    """MLflow's status for a `with` block that ended so."""
    match exception:
        case None:
            return "FINISHED"
        case KeyboardInterrupt():
            return "KILLED"
        case SystemExit(code=code):
            return "KILLED" if code == EXIT_INTERRUPTED else "FAILED" if code else "FINISHED"
        case _:
            return "FAILED"
