"""The pipeline in the container: stopped, killed, under any user, with and without a clone of the project."""

import json
import subprocess
import time
import urllib.request
from typing import Any

import pytest

from tests.container.conftest import Clone, MakeClone, Project
from tests.faults.killed_pipeline import result_hashes
from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow

UNKNOWN_USER = 4242
"""The image's /etc/passwd does not name it."""


@pytest.fixture(scope="module")
def uninterrupted(make_clone: MakeClone) -> Repository:
    """Run once to its end, by the image's own user. Only to be read."""
    clone = make_clone(1000)
    done = clone.run("pipeline")
    assert done.returncode == 0, done.stdout
    return clone.repository


def test_a_stopped_container_goes_on_and_ends_in_the_same_results(
    project: Project, make_clone: MakeClone, uninterrupted: Repository
) -> None:
    clone = make_clone(1000, tracked=True)
    name = f"{project.name}-stopped"
    running = clone.start(name, "pipeline")
    clone.wait_for_checkpoint(running)
    project.engine.run("stop", "--time=120", name)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 75, output
    assert "train baseline: stopped by SIGTERM after step" in output, output
    assert not (clone.root / "models/baseline").exists()

    done = clone.run("pipeline")
    assert done.returncode == 0 and "going on after step" in done.stdout, done.stdout
    assert result_hashes(clone.repository) == result_hashes(uninterrupted)
    assert {path.stat().st_uid for path in (clone.root / "results").rglob("*")} == {1000}

    # The image is part of the result.
    identity = _identity(project)
    measured = json.loads((clone.root / "results/measurements/baseline.json").read_text())
    assert measured["image"] == identity
    (run,) = _runs(project.mlflow_address())
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert run["info"]["status"] == "FINISHED"
    assert tags["image"] == identity and tags["image.git_commit"] == project.image.commit
    metrics = {metric["key"] for metric in run["data"]["metrics"]}
    assert {"loss", "peak_memory_bytes"} <= metrics, sorted(metrics)


def test_a_killed_container_of_an_unknown_user_goes_on(
    project: Project, make_clone: MakeClone, uninterrupted: Repository
) -> None:
    clone = make_clone(UNKNOWN_USER)
    name = f"{project.name}-killed"
    running = clone.start(name, "pipeline", "repro", "train@baseline")
    clone.wait_for_checkpoint(running)
    project.engine.run("kill", name)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 137, output
    lock = clone.root / ".dvc/tmp/rwlock"
    assert "models/baseline" in lock.read_text(), "what makes DVC say that the checkout is busy"

    done = clone.run("pipeline", "repro", "train@baseline")
    assert done.returncode == 0, done.stdout
    assert "repro: removed .dvc/tmp/rwlock, which a killed container had left" in done.stdout
    assert "going on after step" in done.stdout, done.stdout
    hashes = result_hashes(clone.repository)
    expected = result_hashes(uninterrupted)
    assert hashes["train@baseline"] == expected["train@baseline"]
    # Another user may not go on here, and is told what to do.
    refused = Clone(clone.repository, project, 1000).run("pipeline")
    assert refused.returncode == 1
    assert f"FRUGAL_UID={UNKNOWN_USER} FRUGAL_GID={UNKNOWN_USER}" in refused.stdout, refused.stdout


def test_an_unknown_user_compiles(project: Project) -> None:
    """Inductor asks for the user's name, a C++ compiler and Python's headers."""
    program = "import torch; print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(3)).sum())"
    options = (f"--user={UNKNOWN_USER}:{UNKNOWN_USER}", "--env=TORCHINDUCTOR_COMPILE_THREADS=1")
    done = project.engine.run("run", "--rm", *options, project.image.tag, "python", "-c", program)
    assert done.stdout == "tensor(3.)\n", done.stderr


def test_without_a_clone_a_volume_keeps_the_image_s_code_and_the_results(project: Project) -> None:
    def run(*command: str, user: int = UNKNOWN_USER) -> subprocess.CompletedProcess[str]:
        return project.compose(
            *("run", "--rm", "--no-TTY", "--no-deps", "pipeline", *command),
            may_fail=True,
            FRUGAL_FOLDER="workspace",
            FRUGAL_UID=str(user),
            FRUGAL_GID=str(user),
        )

    first = run("repro", "plan@frugal")
    assert first.returncode == 0 and "has the code of this image now" in first.stderr, first
    assert run("sh", "-c", "echo '# mine' >>params.yaml").returncode == 0
    second = run("sh", "-c", "tail -n 1 params.yaml; ls results/plan; git status --short")
    assert second.stdout == "# mine\nfrugal.json\nfrugal.timeline.csv\n M params.yaml\n?? dvc.lock\n", second
    assert "has the code" not in second.stderr, second
    refused = run("true", user=1000)
    assert refused.returncode == 1 and f"belongs to {UNKNOWN_USER}" in refused.stderr, refused
    # The home is on a volume too, and is the first user's.
    elsewhere = ("--no-deps", "--env=FRUGAL_CHECKOUT=/tmp/frugal", "pipeline", "sh", "-c", "echo $HOME")
    home = project.compose("run", "--rm", "--no-TTY", "--user=4343:4343", *elsewhere)
    assert home.stdout == "/home/frugal/uid-4343\n"


def test_nothing_depends_on_the_entrypoint(project: Project) -> None:
    """Clouds put a shell of theirs in its place, as root, and log in without the image's environment."""
    login = ("run", "--rm", "--user=0", "--entrypoint=env", project.image.tag, "-i", "HOME=/root", "bash")
    done = project.engine.run(
        *login, "-lc", "frugal repro --dry tokenize && dvc status --quiet tokenize; id -u"
    )
    assert "Running stage 'tokenize'" in done.stdout and done.stdout.endswith("0\n"), done
    assert "image: " + _identity(project) in done.stdout


def _identity(project: Project) -> str:
    inspected = project.engine.run("inspect", "--format={{json .Config.Labels}}", project.image.tag)
    base = json.loads(inspected.stdout)["org.opencontainers.image.base.name"]
    assert base == (project.image.base or base) and base
    sha256 = project.engine.run(
        "run", "--rm", "--entrypoint=sha256sum", project.image.tag, "/opt/frugal/source/constraints.txt"
    ).stdout.split()[0]
    ask = "from importlib.metadata import version; print(version('torch'))"
    torch = project.engine.run(
        "run", "--rm", "--entrypoint=python", project.image.tag, "-c", ask
    ).stdout.strip()
    return f"{base} with constraints.txt sha256:{sha256} and torch {torch}"


def _runs(address: str) -> list[dict[str, Any]]:
    """Of the experiment of this project, once the senders have sent all."""

    def ask(path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{address}/api/2.0/mlflow/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    experiments = ask("experiments/search", max_results=10)["experiments"]
    ids = [one["experiment_id"] for one in experiments if one["name"] == "frugal"]
    deadline = time.monotonic() + 30
    while True:
        runs = ask("runs/search", experiment_ids=ids, max_results=10)["runs"]
        if all(run["info"]["status"] == "FINISHED" for run in runs) or time.monotonic() > deadline:
            return runs
        time.sleep(0.5)
