"""How far one MLflow store has been told about one run: a small file beside the journal.

One file per store, so that a run begun against one server and continued against another is whole in
both. A lost or broken file costs a second sending, which adds nothing: see `sender`.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from stages.tracking.journal import Journal, Record


@dataclass
class Sent:
    """Written by the process that holds sender.lock, replaced as a whole."""

    store: str
    run_id: str | None = None
    offset: int = 0
    """The journal up to this byte is in the store."""
    artifacts_left: list[Record] = field(default_factory=list)
    """Files before the offset that could not be uploaded; numbers do not wait for them."""
    already_there: dict[str, int] = field(default_factory=dict)
    """Last step of each metric in a run of the store that was found and not created; points up to
    it are left out."""
    is_deleted: bool = False
    """Somebody deleted the run in MLflow: it is not made again."""
    problem: str | None = None
    """Why the last attempt did not get through."""

    def forget_run(self) -> None:
        """The store does not know the run any more: tell it everything again."""
        self.__dict__.update(vars(Sent(self.store)))

    def save(self, journal: Journal) -> None:
        path = _path(journal, self.store)
        half = path.with_suffix(".part")
        with half.open("w") as file:
            json.dump(dataclasses.asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)


def register(journal: Journal, store: str) -> None:
    """This run is to be sent to the store of that name; nothing changes where it already was."""
    if not _path(journal, store).exists():
        Sent(store).save(journal)


def is_registered(journal: Journal, store: str) -> bool:
    return _path(journal, store).exists()


def load_sent(journal: Journal, store: str) -> Sent:
    """What the file says; nothing sent where it is missing or broken."""
    try:
        return Sent(**json.loads(_path(journal, store).read_text()))
    except (OSError, ValueError, TypeError):
        return Sent(store)


def stores_of(journal: Journal) -> list[str]:
    """Names of the stores this run was begun or continued for."""
    names = []
    for path in sorted(journal.folder.glob("sent-*.json")):
        try:
            names.append(json.loads(path.read_text())["store"])
        except (OSError, ValueError, KeyError):
            continue
    return names


def _path(journal: Journal, store: str) -> Path:
    return journal.folder / f"sent-{hashlib.sha256(store.encode()).hexdigest()[:8]}.json"
