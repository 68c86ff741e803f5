"""An environment for each peer, made by the benchmark: its own packages and the torch of this project."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = {
    "trainer": ("transformers==5.23.0", "accelerate==1.15.0"),
    # Takes torch 2.13 as it is; huggingface-hub<1.4 is why it needs an environment of its own.
    "litgpt": ("litgpt==0.5.13", "lightning==2.6.6"),
}
"""The other contenders need what this project needs."""
REQUIREMENTS_CUDA = {"trainer": ("liger-kernel==0.8.5",)}
"""Trainer's use_liger_kernel: Triton kernels, so on a GPU alone."""
_MARKER = "frugal-benchmark.txt"


class PeerEnvironmentError(RuntimeError):
    """A peer's environment cannot be had; one sentence says why."""


def prepare(contender: str, folder: Path, device: str, pip_arguments: list[str]) -> Path:
    """The Python that runs `contender`, in an environment under `folder`; made where it is missing.

    Raises:
        PeerEnvironmentError: pip failed.
    """
    if contender not in REQUIREMENTS:
        return Path(sys.executable)
    wanted = requirements(contender, device)
    place = folder / contender
    python = place / "bin" / "python"
    marker = place / _MARKER
    key = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    if marker.exists() and marker.read_text() == key and python.exists():
        return python
    print(f"{contender}: installing {' '.join(wanted)} into {place}", file=sys.stderr, flush=True)
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, *pip_arguments, *wanted], capture_output=True, text=True, check=False, env=_environment()
    )
    if done.returncode:
        raise PeerEnvironmentError(f"pip could not install {' '.join(wanted)}: {error_line(done.stderr)}")
    marker.write_text(key)
    return python


def requirements(contender: str, device: str) -> list[str]:
    """What pip is asked for: torch as it runs here, then the peer."""
    torch_version = importlib.metadata.version("torch").split("+")[0]
    extra = REQUIREMENTS_CUDA.get(contender, ()) if device == "cuda" else ()
    return [f"torch=={torch_version}", *REQUIREMENTS[contender], *extra]


def error_line(text: str) -> str:
    """Of a traceback the last line that names an error, for advice may follow it; else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["no message"])[-1]


def _environment() -> dict[str, str]:
    """This process's, without what would make pip install elsewhere."""
    return {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
