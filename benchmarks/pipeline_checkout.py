"""A scratch copy of this checkout, in which the real stages run with other params."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pipeline_probe import Report
from benchmarks.pipeline_process import Finished, run

ROOT = Path(__file__).resolve().parents[1]

_SENDER_HAS_SECONDS = "stages.tracking.run_tracker:_WAIT_AT_THE_END_SECONDS=120"
"""Else the run may end before MLflow's sender, and what that took is not known."""


class Checkout:
    """The files that git knows or would know, in a repository of their own."""

    def __init__(self, root: Path) -> None:
        """`root` is such a repository already, or becomes one."""
        self.root = root
        if root.exists():
            return
        copy_files(root)
        for command in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "copy")):
            subprocess.run(
                ("git", "-c", "user.name=benchmark", "-c", "user.email=benchmark", *command),
                cwd=root,
                check=True,
                capture_output=True,
            )

    def copy(self, root: Path) -> "Checkout":
        """With all that was made in it."""
        shutil.copytree(self.root, root, symlinks=True)
        return Checkout(root)

    def params(self) -> dict[str, Any]:
        """params.yaml as it stands here."""
        found: dict[str, Any] = yaml.safe_load((self.root / "params.yaml").read_text())
        return found

    def set_params(self, params: Mapping[str, Any]) -> None:
        (self.root / "params.yaml").write_text(yaml.safe_dump(dict(params), sort_keys=False))

    def python(self, *arguments: str, watch_memory: bool = False) -> Finished:
        """Run this interpreter here, as a user would who has activated its environment."""
        return run((sys.executable, *arguments), self.root, self._environment(), watch_memory=watch_memory)

    def stage(
        self, module: str, *arguments: str, clocks: Iterable[str] = (), settings: Iterable[str] = ()
    ) -> Report:
        """Run a stage with clocks on these functions; see `pipeline_probe`.

        Args:
            clocks: `module:name`.
            settings: `module:name=number`, set before the stage begins.
        """
        report = self.root / ".benchmark.json"
        since = time.clock_gettime(time.CLOCK_MONOTONIC)
        self.python(
            *("-m", "benchmarks.pipeline_probe"),
            *(f"--clock={clock}" for clock in clocks),
            *(f"--set={setting}" for setting in settings),
            *(str(report), repr(since), module, *arguments),
        )
        try:
            return Report.read(report)
        finally:
            report.unlink()

    def train(self, clocks: Iterable[str]) -> Report:
        """Train the first variant from step 0; returns when MLflow's sender has ended too."""
        shutil.rmtree(self.root / ".work", ignore_errors=True)
        variant = next(iter(self.params()["variants"]))
        return self.stage("stages.train", variant, clocks=clocks, settings=[_SENDER_HAS_SECONDS])

    def _environment(self) -> dict[str, str]:
        strange = ("DVC_", "MLFLOW_", "GIT_", "PYTHONPATH")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(strange)}
        return kept | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "DVC_ROOT": str(self.root),
            "DVC_NO_ANALYTICS": "1",
        }


def copy_files(to: Path) -> None:
    """Every file of this checkout that git does not ignore."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
