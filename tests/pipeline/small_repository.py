"""A git repository that holds this pipeline at the smallest size: a thousandth of a second a step."""

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SOURCE = Path(__file__).parents[2]
SHORT_DOCUMENT = "to be or not"
"""Validation document 0: shorter than one sequence, so its loss is that of one forward pass."""
_SHORT_FILE = "03.txt"

_RAN = re.compile(r"^Running stage '([^']+)'", re.MULTILINE)


@dataclass(frozen=True)
class Repository:
    """Runs commands at `root` as a user would who has this interpreter's environment."""

    root: Path

    def environment(self) -> dict[str, str]:
        """Nothing of the developer's DVC, MLflow and git settings; bytecode is written, as by default."""
        strange = ("DVC_", "MLFLOW_", "GIT_", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "TORCHINDUCTOR_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(strange)}
        state = self.root.parent / "state"
        return kept | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "DVC_NO_ANALYTICS": "1",
            "DVC_SITE_CACHE_DIR": str(state / "dvc"),
            "DVC_GLOBAL_CONFIG_DIR": str(state / "config"),
            "DVC_SYSTEM_CONFIG_DIR": str(state / "system"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            # One small block to compile: starting a pool of compilers would take longer than that.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "COLUMNS": "200",
        }

    def run(self, *command: str, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert may_fail or done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done

    def dvc(self, *arguments: str) -> str:
        return self.run("dvc", *arguments).stdout

    def repro(self, *arguments: str) -> set[str]:
        """The stages that `dvc repro` ran, each checked to have run once."""
        ran = _RAN.findall(self.dvc("repro", *arguments))
        assert len(ran) == len(set(ran))
        return set(ran)

    def commit(self, message: str) -> None:
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--message", message)

    def params(self) -> dict[str, Any]:
        return yaml.safe_load((self.root / "params.yaml").read_text())

    def edit_params(self, edit: Callable[[dict[str, Any]], None]) -> None:
        params = self.params()
        edit(params)
        (self.root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))

    def keep_variants(self, *names: str) -> None:
        def keep(params: dict[str, Any]) -> None:
            params["variants"] = {name: params["variants"][name] for name in names}

        self.edit_params(keep)

    def out_hashes(self, stage: str) -> dict[str, str]:
        """md5 by path, from dvc.lock."""
        lock = yaml.safe_load((self.root / "dvc.lock").read_text())
        return {out["path"]: out["md5"] for out in lock["stages"][stage]["outs"]}

    def all_outs(self) -> list[str]:
        lock = yaml.safe_load((self.root / "dvc.lock").read_text())
        return [out["path"] for stage in lock["stages"].values() for out in stage.get("outs", [])]

    def copy_to(self, folder: Path) -> "Repository":
        shutil.copytree(self.root, folder, symlinks=True)
        return Repository(folder)


def make_small_repository(root: Path) -> Repository:
    """The checkout's files with small params and a small corpus, in one commit."""
    for name in _source_files():
        if (SOURCE / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(SOURCE / name, root / name)
    _write_corpus(root / "corpus")
    repository = Repository(root)
    repository.edit_params(_shrink)
    repository.run("git", "init", "--quiet", "--initial-branch=main")
    for key, value in {"user.name": "A Tester", "user.email": "tester@example.com"}.items():
        repository.run("git", "config", key, value)
    repository.commit("small params")
    return repository


def _source_files() -> Sequence[str]:
    """What git has or would have: files not yet added belong to the working tree under test."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and not name.startswith("tests/")]


def _write_corpus(folder: Path) -> None:
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 8))) for _ in range(300)]
    folder.mkdir()
    for number in range(24):
        text = " ".join(chance.choices(words, k=200))
        (folder / f"{number:02}.txt").write_text(text)
    (folder / _SHORT_FILE).write_text(SHORT_DOCUMENT)


def _shrink(params: dict[str, Any]) -> None:
    """The same variants with the same techniques, on a model of ten thousand parameters."""
    params["corpus"] = {"source": "files", "paths": ["corpus/*.txt"], "validation_every": 4}
    params["tokenizer"] = {"vocab_size": 320}
    params["model"] |= {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    whole_batch = params["training"]["global_batch_size"]
    params["training"] |= {
        "sequence_length": 32,
        "global_batch_size": 4,
        "token_budget": 32 * 4 * 6,
        "learning_rate": 0.004,
        "warmup_steps": 2,
        "log_every_steps": 2,
    }
    params["evaluation"] |= {"batch_size": 16, "bootstrap_samples": 200}
    params["evaluation"]["samples"] |= {"prompts": ["a"], "max_new_tokens": 5}
    params["hardware"]["device"] = "cpu"
    for variant in params["variants"].values():
        variant["micro_batch_size"] = 4 if variant["micro_batch_size"] == whole_batch else 2
