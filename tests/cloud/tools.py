"""SkyPilot and dstack, to parse files with: in a folder of their own, which imports the rest from here."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_PINS = Path(__file__).with_name("requirements.txt")
_INSTALL_SECONDS = 300

# As its server does: the client lets keys pass that it does not know.
_SKYPILOT = """
import json, os, sys
os.environ["IS_SKYPILOT_SERVER"] = "true"
import sky
from sky.server import plugins
plugins.load_plugins(plugins.ExtensionContext())

def parse(file):
    task = sky.Task.from_yaml(file)
    task.expand_and_validate_file_mounts()
    [resources] = task.resources
    return {
        "zone": resources.zone,
        "use_spot": resources.use_spot,
        "recovery": resources.job_recovery,
        "volumes": resources.volumes,
        "image": next(iter(resources.image_id.values())),
        "run_options": resources.cluster_config_overrides["docker"]["run_options"],
        "files": task.file_mounts,
        "variables": sorted(task.envs | dict.fromkeys(task.secrets)),
        "commands": task.run,
    }
"""
_DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration

def parse(file):
    with open(file) as text:
        return json.loads(parse_apply_configuration(yaml.safe_load(text)).model_dump_json())
"""
_EACH = """
for file in sys.argv[1:]:
    try:
        verdict = {"parsed": parse(file)}
    except Exception as error:
        verdict = {"refused": f"{type(error).__name__}: {error}"}
    print(json.dumps(verdict, default=lambda member: member.value))
"""


class NoToolsError(RuntimeError):
    """The package index has no answer; says what pip said."""


def parse_with_skypilot(files: Iterable[Path]) -> list[dict[str, Any]]:
    """One {"parsed": …} or {"refused": why} for each."""
    return _parse(_SKYPILOT + _EACH, files)


def parse_with_dstack(files: Iterable[Path]) -> list[dict[str, Any]]:
    return _parse(_DSTACK + _EACH, files)


def _parse(script: str, files: Iterable[Path]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {
            "HOME": home,
            "PYTHONPATH": str(_installed()),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        }
        command = [sys.executable, "-c", script, *map(str, files)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _installed() -> Path:
    """The folder, beside this interpreter's packages; made once for a set of pins.

    Raises:
        NoToolsError: pip could not install them.
    """
    key = hashlib.sha256(_PINS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = Path(sys.prefix) / f"cloud-tools-{key}"
    if folder.exists():
        return folder
    part = Path(tempfile.mkdtemp(dir=sys.prefix, prefix="cloud-tools-", suffix=".part"))
    pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input")
    options = ("--quiet", "--no-deps", "--no-compile", "--target", str(part), "--requirement", str(_PINS))
    try:
        done = subprocess.run(
            [*pip, *options], capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False
        )
        # A version that the index does not have is a mistake in the pins.
        assert not re.search(r"\(from versions: (?!none)", done.stderr), done.stderr
        if done.returncode:
            reason = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
            raise NoToolsError(f"SkyPilot and dstack cannot be installed: {reason}")
        part.rename(folder)
    except subprocess.TimeoutExpired:
        raise NoToolsError(f"pip did not end within {_INSTALL_SECONDS} seconds") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
