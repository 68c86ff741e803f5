"""Tags that say where a run came from: git, DVC, and the hashes of what it made."""

import contextlib
import getpass
import os
import subprocess
import sys
from pathlib import Path

import yaml

# What `dvc repro` itself rewrites says nothing about the code a run was made with.
_WRITTEN_BY_THE_PIPELINE = ("dvc.lock", "results")


def provenance_tags(folder: Path | None = None) -> dict[str, str]:
    """Git commit and whether tracked files differ from it, DVC stage and experiment, user, command.

    A tag whose source is missing (no git, no DVC) is left out.
    """
    tags = {"mlflow.source.type": "LOCAL", "mlflow.source.name": _command()}
    with contextlib.suppress(KeyError, OSError):  # a uid without a passwd entry, as in containers
        tags["mlflow.user"] = getpass.getuser()
    if commit := _git(folder, "rev-parse", "HEAD"):
        excluded = [f":(exclude,top){path}" for path in _WRITTEN_BY_THE_PIPELINE]
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", *excluded)
        tags |= {"git.commit": commit, "mlflow.source.git.commit": commit}
        if changes is not None:
            tags["git.dirty"] = "true" if changes else "false"
    # Set by DVC for every stage it runs, and for every experiment (dvc/env.py).
    for tag, variable in {"dvc.stage": "DVC_STAGE", "dvc.experiment": "DVC_EXP_NAME"}.items():
        if value := os.environ.get(variable):
            tags[tag] = value
    return tags


def outs_md5_tags(stage: str, dvc_lock: Path = Path("dvc.lock")) -> dict[str, str]:
    """`{"md5.models/baseline": "….dir", …}`: the committed outs of a stage such as "train@baseline".

    Empty where the stage is not in the lock file: DVC writes it after the stage has ended.
    """
    try:
        lock = yaml.safe_load(dvc_lock.read_text())
        outs = lock["stages"][stage]["outs"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return {}
    return {f"md5.{out['path']}": out["md5"] for out in outs if "md5" in out}


def _command() -> str:
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    return f"python -m {module.name}" if module else Path(sys.argv[0] or "python").name


def _git(folder: Path | None, *arguments: str) -> str | None:
    """What git prints; None where there is no git, no repository, or no answer."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
