"""What reliability costs: checkpoints and tracking against none, in seconds of training.

    python -m benchmarks.reliability_cost                     the default model, half an hour on two cores
    python -m benchmarks.reliability_cost --steps 100 --runs 1

Each run is the real train stage in a copy of the checkout. The settings take turns in every round, so
that a machine that slows down slows all of them. Prints one Markdown table of medians.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pipeline_checkout import copy_files

_SLOW_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Setting:
    """One way to train the same model."""

    name: str
    checkpoints: dict[str, Any] | None = None
    """None leaves those of params.yaml."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """One run of one setting."""

    step_seconds: float
    """Of training, without imports, the first step's compilation included."""
    stage_seconds: float
    """Of the whole process."""
    saves: int
    save_share: float
    """Seconds of the training thread in saving / seconds of training."""
    device: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variant", default="baseline")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run (default: params.yaml's)")
    parser.add_argument("--runs", type=int, default=3, help="of each setting")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, slow_server() as slow:
        base = Path(scratch) / "base"
        prepare(base, options.steps)
        settings = [
            Setting("no checkpoints", {"every_minutes": None, "every_steps": None}),
            Setting("checkpoints of params.yaml"),
            Setting("a checkpoint every 20 steps", {"every_minutes": None, "every_steps": 20}),
            Setting("params.yaml, MLflow server dead", None, {"MLFLOW_TRACKING_URI": dead_server()}),
            Setting("params.yaml, MLflow server slow", None, {"MLFLOW_TRACKING_URI": slow}),
        ]
        found: dict[str, list[Measured]] = {setting.name: [] for setting in settings}
        for number in range(options.runs):
            shift = number % len(settings)
            for setting in settings[shift:] + settings[:shift]:
                place = Path(scratch) / "run"
                found[setting.name].append(measure(base, place, options.variant, setting))
                print(f"round {number + 1}: {setting.name}", file=sys.stderr, flush=True)
    print(table(found, options.variant))
    return 0


def prepare(base: Path, steps: int | None) -> None:
    """The checkout's files with tokens and MLflow's database."""
    copy_files(base)
    params = yaml.safe_load((base / "params.yaml").read_text())
    training = params["training"]
    if steps is not None:
        training["token_budget"] = steps * training["global_batch_size"] * training["sequence_length"]
        training["warmup_steps"] = min(training["warmup_steps"], steps // 10)
    (base / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    for module in ("stages.tokenize_data", "stages.tracking.initialise"):
        run_stage(base, module, {})


def measure(base: Path, place: Path, variant: str, setting: Setting) -> Measured:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(base, place)
    if setting.checkpoints is not None:
        params = yaml.safe_load((place / "params.yaml").read_text())
        params["checkpoints"] = setting.checkpoints
        (place / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    started = time.perf_counter()
    run_stage(place, "stages.train", setting.environment, variant)
    stage_seconds = time.perf_counter() - started
    measured = json.loads((place / f"results/measurements/{variant}.json").read_text())
    steps = json.loads((place / f"models/{variant}/training.json").read_text())["steps"]
    return Measured(
        step_seconds=measured["wall_seconds"] / steps,
        stage_seconds=stage_seconds,
        saves=measured["checkpoints"],
        save_share=measured["checkpoint_training_seconds"] / measured["wall_seconds"],
        device=f"{measured['device']['name']} ({measured['device']['kind']})",
    )


def run_stage(folder: Path, module: str, environment: dict[str, str], *arguments: str) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DVC_", "MLFLOW_"))}
    done = subprocess.run(
        (sys.executable, "-m", module, *arguments),
        cwd=folder,
        env=kept | {"DVC_ROOT": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)}:\n{done.stdout}{done.stderr}")


def dead_server() -> str:
    """A port of this machine where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def slow_server() -> Iterator[str]:
    """Takes every request, and after seconds says that it is not available."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            time.sleep(_SLOW_ANSWER_SECONDS)
            connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the end
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def table(found: dict[str, list[Measured]], variant: str) -> str:
    """Markdown; ratios are to the first setting."""
    rows = []
    reference: float | None = None
    for name, runs in found.items():
        step = statistics.median(run.step_seconds for run in runs)
        reference = reference or step
        spread = max(run.step_seconds for run in runs) / min(run.step_seconds for run in runs) - 1
        rows.append(
            f"| {name} | {step * 1000:.1f} | {step / reference:.3f} | {spread:.1%} "
            f"| {statistics.median(run.saves for run in runs):.0f} "
            f"| {statistics.median(run.save_share for run in runs):.2%} "
            f"| {statistics.median(run.stage_seconds for run in runs):.1f} |"
        )
    runs = [run for measured in found.values() for run in measured]
    head = (
        f"Variant {variant}, {len(runs) // len(found)} runs of each setting in turns, medians. "
        f"Device: {', '.join(sorted({run.device for run in runs}))}.",
        "",
        "| setting | ms a step | ratio | (max / min) - 1 | saves | saving / training | stage seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    return "\n".join((*head, *rows))


if __name__ == "__main__":
    sys.exit(main())
