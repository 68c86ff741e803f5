"""Kills a running `dvc repro`, as often as planned, at moments of two kinds: random, and seen on the disk.

Nothing in the product knows of it: moments are found by watching files and processes.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from tests.pipeline.small_repository import Repository

How = Literal[
    "SIGKILL group", "SIGKILL dvc", "SIGKILL stage", "SIGTERM group", "SIGTERM stage", "SIGINT group"
]
HOWS: tuple[How, ...] = (
    "SIGKILL group",
    "SIGKILL dvc",
    "SIGKILL stage",
    "SIGTERM stage",
    "SIGINT group",
    "SIGTERM group",
)
# Seconds and memory, and what is made of them: no two runs have the same.
_MEASURED = ("results/measurements/", "results/compare", "results/report", "results/figures")
_POLL_SECONDS = 0.0002
_PATIENCE_SECONDS = 900.0


@dataclass(frozen=True)
class Moment:
    """When to kill a stage."""

    is_there: Callable[[Path, str], bool]
    """Asked again and again with the repository's root and the variant, once the stage's process runs."""
    random_seconds: float = 0.0
    """And then up to so much later."""


def _checkpoints(root: Path, variant: str, pattern: str = "step-*") -> set[str]:
    return {path.name for path in (root / ".work/train" / variant).glob(f"*/{pattern}")}


def _always(root: Path, variant: str) -> bool:
    return True


MOMENTS = {
    "any time": Moment(_always, 4.0),
    "starting": Moment(_always, 2.0),
    "training": Moment(_always, 0.8),  # like "saved", and then
    "saving": Moment(lambda root, variant: bool(_checkpoints(root, variant, ".step-*"))),
    "saved": Moment(_always),  # once a new checkpoint has its name: see `wait_for`
    # Milliseconds: where a busy machine lets us miss them, right after the rename.
    "publishing": Moment(
        lambda root, variant: any((root / "models" / name).exists() for name in (f".{variant}.part", variant))
    ),
    "half published": Moment(lambda root, variant: (root / "models" / variant).exists()),
    "published": Moment(lambda root, variant: (root / f"results/measurements/{variant}.csv").exists()),
    "tokenizing": Moment(lambda root, _: any(root.glob(".work/tokenize/all/*/lock")), 0.5),
    "tokenized": Moment(lambda root, _: (root / "data/tokens").exists()),
    "evaluated": Moment(lambda root, variant: (root / "hugging_face" / variant).exists()),
}


@dataclass(frozen=True)
class Kill:
    """One planned kill."""

    stage: str
    moment: str
    how: How


@dataclass
class Account:
    """What became of the planned kills."""

    tried: list[Kill] = field(default_factory=list)
    missed: list[Kill] = field(default_factory=list)
    """Their moment was over before it was seen, or the stage ended before the signal came."""
    resumed: list[Kill] = field(default_factory=list)
    """The stage ran again and ended well."""
    from_checkpoint: int = 0
    """Trainings that said that they go on from a checkpoint, or were complete."""
    refused: int = 0
    """Runs that met the orphan of the killed one."""
    exits_75: int = 0
    identical: list[Kill] = field(default_factory=list)
    """Every result out of the stage has the hash of the uninterrupted run."""
    log: str = ""

    def summary(self) -> str:
        def count(kills: Sequence[Kill]) -> str:
            return f"{len(kills):2}"

        by_how = {how: sum(kill.how == how for kill in self.tried) for how in HOWS}
        hows = ", ".join(f"{number} {how}" for how, number in by_how.items() if number)
        stages = sorted({kill.stage for kill in self.tried})
        by_moment = {moment: sum(kill.moment == moment for kill in self.tried) for moment in MOMENTS}
        moments = ", ".join(f"{number} {moment}" for moment, number in by_moment.items() if number)
        missed = ", ".join(f"{kill.stage} {kill.moment}" for kill in self.missed) or "none"
        return (
            f"kills tried {count(self.tried)}, resumed {count(self.resumed)} "
            f"({self.from_checkpoint} from a checkpoint), identical {count(self.identical)}\n"
            f"  {hows}\n  {moments}\n  in {', '.join(stages)}\n"
            f"  {self.exits_75} exits with status 75, {self.refused} refused beside an orphan; "
            f"moments missed: {missed}"
        )


def result_hashes(repository: Repository) -> dict[str, dict[str, str]]:
    """md5 by path by stage, of every out in dvc.lock that is a result and no measurement."""
    lock = yaml.safe_load((repository.root / "dvc.lock").read_text())
    return {
        stage: {
            out["path"]: out["md5"] for out in entry.get("outs", []) if not out["path"].startswith(_MEASURED)
        }
        for stage, entry in lock["stages"].items()
    }


def run_to_end(repository: Repository) -> list[str]:
    """One undisturbed `dvc repro`; the stages in the order in which they ran."""
    log = repository.root.parent / "repro.log"
    status = _Run(repository, log).process.wait(_PATIENCE_SECONDS)
    assert status == 0, log.read_text()
    return re.findall(r"^Running stage '([^']+)'", log.read_text(), re.MULTILINE)


def kill_and_finish(repository: Repository, plan: Sequence[Kill], chance: random.Random) -> Account:
    """Run `dvc repro`, killed as `plan` says (in the order of DVC's stages), then to its end."""
    account = Account()
    log = repository.root.parent / "repro.log"
    run: _Run | None = None
    for kill in plan:
        run = run if run is not None and run.is_going() else _Run(repository, log)
        if run.wait_for(kill, chance) and run.deliver(kill, chance):
            account.tried.append(kill)
            run = None
        else:
            account.missed.append(kill)
    if run is not None:
        run.process.wait(_PATIENCE_SECONDS)
    for _ in range(4):
        last = _Run(repository, log)
        if last.process.wait(_PATIENCE_SECONDS) == 0:
            break
        # Only an orphan of the last kill may be in the way, and not for long.
        assert re.search("with these params since|No such file", log.read_text()[last.log_starts :]), log
        time.sleep(1)
    account.log = log.read_text()
    done = result_hashes(repository)
    account.resumed = [kill for kill in account.tried if kill.stage in done]
    account.from_checkpoint = len(
        re.findall(r"going on after step \d+ of|was complete; its outs", account.log)
    )
    account.refused = len(re.findall(r"with these params since .*lets it save", account.log))
    account.exits_75 = len(re.findall(r"exited with 75", account.log))
    return account


class _Run:
    """One `dvc repro` in a session of its own."""

    def __init__(self, repository: Repository, log: Path):
        self.root = repository.root
        with log.open("a") as file:
            self.log_starts = file.tell()
            self.process = subprocess.Popen(
                ("dvc", "repro"),
                cwd=repository.root,
                env=repository.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_going(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, kill: Kill, chance: random.Random) -> bool:
        """Whether the moment came; False once the stage is in dvc.lock or `dvc repro` ended."""
        _, _, variant = kill.stage.partition("@")
        while (stage := self._stage_process(kill.stage)) is None:
            if not self.is_going() or self._is_committed(kill.stage):
                return False
            time.sleep(0.005)
        moment = MOMENTS[kill.moment]
        before = _checkpoints(self.root, variant)
        polls = 0
        while not (
            _checkpoints(self.root, variant) - before
            if kill.moment in ("saved", "training")
            else moment.is_there(self.root, variant)
        ):
            polls += 1
            if polls % 50 == 0 and (not self.is_going() or self._is_committed(kill.stage)):
                return False
            # A stage that has ended without this moment will not have it any more.
            if polls % 50 == 0 and not _is_alive(stage) and not kill.moment.endswith("published"):
                return False
            time.sleep(_POLL_SECONDS)
        if moment.random_seconds:
            until = time.monotonic() + chance.uniform(0, moment.random_seconds)
            while time.monotonic() < until and _is_alive(stage):
                time.sleep(_POLL_SECONDS)
        return self.is_going()

    def deliver(self, kill: Kill, chance: random.Random) -> bool:
        """Send the signal and wait for the end; False where it came too late to stop anything."""
        name, _, whom = kill.how.partition(" ")
        number = signal.Signals[name]
        stage = self._stage_process(kill.stage)
        if whom == "stage" and (stage is None or not _send(stage, number)):
            return False
        if whom == "group":
            if self._is_committed(kill.stage):
                return False
            os.killpg(self.process.pid, number)
        if whom == "dvc":
            if self._is_committed(kill.stage):
                return False
            self.process.send_signal(number)
            self.process.wait(_PATIENCE_SECONDS)
            if stage is not None and chance.random() < 0.5:
                time.sleep(chance.uniform(0, 0.5))
                _send(stage, signal.SIGKILL)
                self._wait_until_all_are_gone()
            # Otherwise the orphan goes on while the next `dvc repro` starts.
            return True
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self.is_going():
            if whom == "stage" and self._is_committed(kill.stage):
                return False  # it had ended already
            assert time.monotonic() < deadline, f"{kill} did not stop dvc repro"
            time.sleep(0.005)
        self._wait_until_all_are_gone()
        return True

    def _is_committed(self, stage: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return f"\n  {stage}:\n" in (self.root / "dvc.lock").read_text()
        return False

    def _stage_process(self, stage: str) -> int | None:
        name, _, variant = stage.partition("@")
        module = {"tokenize": "stages.tokenize_data"}.get(name, f"stages.{name}")
        wanted = ["-m", module, *([variant] if variant else [])]
        for pid, command in self._group():
            if command[1:] == wanted:
                return pid
        return None

    def _group(self) -> Iterator[tuple[int, list[str]]]:
        """Processes of this `dvc repro`, zombies left out. Senders to MLflow have groups of their own."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                state, _, group, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(group) == self.process.pid and state != "Z":
                    yield int(entry.name), (entry / "cmdline").read_text().rstrip("\0").split("\0")

    def _wait_until_all_are_gone(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while left := list(self._group()):
            assert time.monotonic() < deadline, left
            time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (Path(f"/proc/{pid}/stat")).read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _send(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
