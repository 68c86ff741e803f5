"""`python -m stages.tracking.send FOLDER`: the background process; started by the trainer, see `background`.

Standard input is a pipe from the trainer. It ends when the trainer does, however it does.
"""

import os
import select
import sys
import threading
from pathlib import Path

from stages.tracking.journal import Journal
from stages.tracking.sender import NotSent, Sender
from stages.tracking.store import connect, store_from_environment

_SEND_EVERY_SECONDS = 5.0
_RETRY_AT_MOST_EVERY_SECONDS = 60.0
# No sender outlives its trainer for longer. Long, because on a busy machine the lowest priority may have
# left it not even the seconds of CPU that importing mlflow takes.
_LAST_CHANCE_SECONDS = 60.0


def main(folder: str) -> int:
    os.nice(19)
    journal = Journal(Path(folder))
    sender = Sender(journal, store_from_environment(), connect)
    wait_seconds = 0.0
    while not _trainer_is_gone(wait_seconds):
        is_sent = _try_to_send(sender)
        wait_seconds = (
            _SEND_EVERY_SECONDS
            if is_sent
            else min(2 * max(wait_seconds, _SEND_EVERY_SECONDS), _RETRY_AT_MOST_EVERY_SECONDS)
        )
    deadline = threading.Timer(_LAST_CHANCE_SECONDS, os._exit, [1])
    deadline.daemon = True
    deadline.start()
    journal.mark_if_abandoned()
    # The sender of a start before this one may still be at it.
    return 0 if _try_to_send(sender, _LAST_CHANCE_SECONDS) else 1


def _try_to_send(sender: Sender, patience_seconds: float = 0) -> bool:
    try:
        sender.send(patience_seconds)
    except NotSent as error:
        print(f"not sent: {error}", flush=True)
        return False
    return True


def _trainer_is_gone(wait_seconds: float) -> bool:
    """True at once when the pipe ends, else False after `wait_seconds`."""
    readable, _, _ = select.select([sys.stdin], [], [], wait_seconds)
    return bool(readable)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
