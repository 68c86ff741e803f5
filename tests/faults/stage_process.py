"""One stage as a process, watched through the files it writes."""

import hashlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.pipeline.small_repository import Repository

_PATIENCE_SECONDS = 240.0


@dataclass(frozen=True)
class Ended:
    """How a stage ended."""

    status: int
    stdout: str
    stderr: str

    def errors(self) -> list[str]:
        """Lines on stderr but for those of tracking, which is off in these repositories and says so."""
        return [line for line in self.stderr.splitlines() if not line.startswith("tracking: ")]


class StageProcess:
    """`python -m stages.STAGE VARIANT` in a repository; `prefix` runs it, such as nsenter."""

    def __init__(
        self,
        repository: Repository,
        stage: str,
        *arguments: str,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.root, self.variant = repository.root, arguments[0] if arguments else ""
        number = len(list(self.root.parent.glob("*.stdout")))
        self._outputs = [self.root.parent / f"{number}.{name}" for name in ("stdout", "stderr")]
        with self._outputs[0].open("w") as stdout, self._outputs[1].open("w") as stderr:
            self.process = subprocess.Popen(
                (*prefix, "python", "-m", f"stages.{stage}", *arguments),
                cwd=self.root,
                env=repository.environment() | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def wait_for(self, path: str, *, after_seconds: float = 0.0) -> None:
        """Until something matches the glob `path` below the root, while the process runs."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not any(self.root.glob(path)):
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < deadline, f"no {path}"
            time.sleep(0.002)
        time.sleep(after_seconds)

    def wait_for_checkpoint(self) -> None:
        self.wait_for(f".work/train/{self.variant}/*/step-*")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def errors_so_far(self) -> str:
        return self._outputs[1].read_text()

    def end(self) -> Ended:
        """Wait for it."""
        self.process.wait(_PATIENCE_SECONDS)
        return Ended(self.process.returncode, *(path.read_text() for path in self._outputs))


def train(repository: Repository, variant: str, *arguments: str) -> Ended:
    return StageProcess(repository, "train", variant, *arguments).end()


def checkpoints(root: Path, variant: str) -> list[str]:
    return sorted(path.name for path in (root / ".work/train" / variant).glob("*/step-*"))


def results(root: Path, variant: str) -> dict[str, str]:
    """SHA-256 by path of the files that a training leaves as results."""
    files = [*sorted((root / "models" / variant).iterdir()), root / f"results/curves/{variant}.csv"]
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
