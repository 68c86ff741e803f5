"""Every command, file and link that README.md names is there and answers."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.params import ParamsError, check_params

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent

_BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
_INLINE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL))
_MADE_BY_THE_PIPELINE = (
    *("results/", "hugging_face/", "models/", "data/", "dvc.lock", "dvc_plots/"),
    *("mlflow.db", "mlartifacts/", ".venv", ".work/"),
)


def _commands() -> set[str]:
    """Lines of code blocks and inline code, without prompts and comments."""
    lines = [
        line.removeprefix("$ ") for language, block in _BLOCKS if not language for line in block.split("\n")
    ]
    found = {re.sub(r"\s+#.*", "", line).strip() for line in [*lines, *_INLINE]}
    return {re.sub(r"^([A-Z_]+=\S+ )+", "", line) for line in found}


def _starting_with(*words: str) -> list[str]:
    start = " ".join(words) + " "
    return sorted(
        command for command in _commands() if f"{command} ".startswith(start) and "…" not in command
    )


def _default_params() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "params.yaml").read_text())


def test_the_commands_were_found() -> None:
    assert {"make repro", "make test"} <= set(_starting_with("make"))
    assert len(_starting_with("dvc")) > 10
    assert len(_starting_with("python", "-m")) >= 2


@pytest.mark.parametrize("command", _starting_with("make"))
def test_make_targets_exist(command: str) -> None:
    dry_run = ["make", "--dry-run", *shlex.split(command)[1:]]
    done = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_make_help_and_the_readme_name_the_same_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    in_help = set(re.findall(r"^(make \S+)", done.stdout, re.MULTILINE))
    assert in_help == {command for command in _starting_with("make") if command != "make help"}


@pytest.mark.parametrize("module", sorted({c.split()[2] for c in _starting_with("python", "-m")}))
def test_modules_run(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert module in done.stdout


@pytest.mark.parametrize("command", _starting_with("dvc"))
def test_dvc_commands_and_their_options_exist(command: str) -> None:
    from dvc.cli import parse_args

    # Everything but running it: unknown commands and options exit here.
    assert parse_args(shlex.split(command)[1:]).func is not None


def test_files_and_folders_exist() -> None:
    named = {text for text in _INLINE if re.fullmatch(r"[\w./-]+", text)}
    paths = {text for text in named if "/" in text or Path(text).suffix in (".md", ".yaml", ".txt", ".lock")}
    paths |= {link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link}
    paths |= {
        word for command in _commands() for word in command.split() if word.startswith(("presets/", "docs/"))
    }
    ours = {path for path in paths if not path.startswith(_MADE_BY_THE_PIPELINE)}
    assert len(ours) > 15
    assert not sorted(path for path in ours if not (ROOT / path).exists())


def test_made_files_are_outs_of_the_pipeline() -> None:
    """A path under results/, models/ and so on is one that dvc.yaml writes."""
    pipeline = (ROOT / "dvc.yaml").read_text().replace("${item.variant}", "VARIANT")
    for path in (text for text in _INLINE if re.fullmatch(r"(results|hugging_face)/[\w./-]+", text)):
        assert path.rstrip("/") in pipeline, path


def test_rooms_of_the_code_are_all_named() -> None:
    rooms = {f"stages/{path.parent.name}/" for path in (ROOT / "stages").glob("*/__init__.py")}
    assert not rooms - set(_INLINE)
    presets = {f"presets/{path.name}" for path in (ROOT / "presets").glob("*.yaml")}
    assert not presets - set(_INLINE)


def test_yaml_snippets_are_params() -> None:
    for block in (block for language, block in _BLOCKS if language == "yaml"):
        params = _default_params()
        for section, content in yaml.safe_load(block).items():
            # A snippet of `variants` or `training` adds to them; any other section stands for itself.
            params[section] = params[section] | content if section in ("variants", "training") else content
        check_params(params)


def test_error_messages_shown_are_the_real_ones() -> None:
    raw = _default_params()
    raw["variants"]["frugal"]["micro_batch_size"] = 7
    raw["variants"]["baseline"]["precison"] = raw["variants"]["baseline"].pop("precision")
    with pytest.raises(ParamsError) as error:
        check_params(raw, "params.yaml")
    assert f"train frugal: {error.value}" in README


def test_python_snippets_parse() -> None:
    for block in (block for language, block in _BLOCKS if language == "python"):
        compile(block, "README.md", "exec")


@pytest.mark.parametrize(
    "document", ["README.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in (ROOT / "docs").iterdir())]
)
def test_documents_name_no_machine(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    text = text.replace("/tmp/frugal-gpus", "")  # the same on every machine (stages/device_lock.py)
    assert not re.findall(r"(?<![\w.])/(?:home|root|work|opt|tmp|Users|mnt)\b\S*", text)
