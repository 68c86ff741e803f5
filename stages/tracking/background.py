"""The process that sends while the trainer trains, seen from the trainer.

A process and not a thread, because importing mlflow alone takes seconds of CPU and of Python's
global lock and adds some 200 MB to the resident memory that the trainer measures. At the lowest
priority it takes only what the trainer leaves. It reads the journal from disk; a pipe tells it when
the trainer is gone, killed or not.
"""

import os
import subprocess
import sys
from pathlib import Path

from stages.tracking.journal import Journal

# stages/tracking/background.py: the folder that holds the package `stages`.
_IMPORT_ROOT = Path(__file__).resolve().parents[2]


class BackgroundSender:
    """Starts `python -m stages.tracking.send FOLDER`; its output goes to sender.log in the folder."""

    def __init__(self, journal: Journal) -> None:
        search_path = [str(_IMPORT_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search_path))}
        with (journal.folder / "sender.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stages.tracking.send", str(journal.folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C in the terminal is for the trainer. Not a new session: Linux's autogroup
                # would then weigh it against the trainer as an equal, whatever its priority.
                process_group=0,
            )

    def finish(self, timeout_seconds: float) -> bool | None:
        """Let it send the rest. Whether all was sent; None when it is still at it after that time.

        It is left to end by itself then; its own deadline sees to that.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(timeout_seconds) == 0
        except subprocess.TimeoutExpired:
            return None
