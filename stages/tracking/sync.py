"""`python -m stages.tracking.sync`: send MLflow everything that could not be sent before.

Exit status 0 when all runs begun for this store are whole in it, else 1.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from stages.tracking.journal import Journal, all_journals
from stages.tracking.sender import NotSent, Sender
from stages.tracking.sent import is_registered, load_sent, stores_of
from stages.tracking.store import Store, connect, in_words, store_from_environment, work_root

_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class SyncResult:
    """One run after an attempt to send it."""

    run: str
    is_complete: bool
    message: str


def sync(work: Path) -> list[SyncResult]:
    """Send what is missing of every run under `work`.

    Never raises for a store that is down, nor for a journal that cannot be written.
    """
    store = store_from_environment()
    journals = all_journals(work)
    results = [_elsewhere(journal) for journal in journals if not is_registered(journal, store.name)]
    mine = [journal for journal in journals if is_registered(journal, store.name)]
    if mine:
        try:
            client = connect(store)
        except Exception as error:  # whatever a store can throw: it is for later
            # One wait for a dead server, not one per run.
            return results + [_not_sent(journal, store, in_words(error)) for journal in mine]
        results += [_send(journal, store, Sender(journal, store, lambda _: client)) for journal in mine]
    return results


def _send(journal: Journal, store: Store, sender: Sender) -> SyncResult:
    try:
        already = load_sent(journal, store.name).offset
        journal.mark_if_abandoned()
        sender.send(_PATIENCE_SECONDS)
        sent = load_sent(journal, store.name)
    except NotSent as error:
        return _not_sent(journal, store, str(error))
    except OSError as error:  # a journal of another user, a full disk
        return SyncResult(journal.name, False, str(error))
    if sent.is_deleted:
        return SyncResult(journal.name, True, f"was deleted in {store.name}, left alone")
    news = "sent" if sent.offset > already else "nothing to send"
    return SyncResult(journal.name, True, f"{news}, all in {store.name}")


def _not_sent(journal: Journal, store: Store, reason: str) -> SyncResult:
    if load_sent(journal, store.name).is_deleted:
        return SyncResult(journal.name, True, f"was deleted in {store.name}, left alone")
    left = journal.size_bytes - load_sent(journal, store.name).offset
    return SyncResult(journal.name, False, f"{left} bytes of its journal are not in {store.name}: {reason}")


def _elsewhere(journal: Journal) -> SyncResult:
    stores = " and ".join(stores_of(journal)) or "another store"
    return SyncResult(journal.name, True, f"belongs to {stores}; set MLFLOW_TRACKING_URI to send it there")


def main() -> int:
    results = sync(work_root())
    for result in results:
        print(f"tracking: {result.run}: {result.message}")
    if not results:
        print("tracking: no run has been tracked here yet")
    return 0 if all(result.is_complete for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
