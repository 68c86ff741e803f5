"""docker/frugal.sh makes the folder of the pipeline ready: a clone, an empty one, another image's."""

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.pipeline.small_repository import SOURCE

SCRIPT = SOURCE / "docker/frugal.sh"


@dataclass(frozen=True)
class Container:
    """What the script knows of a container: the image's code and commit, and the mounted folder."""

    source: Path
    checkout: Path
    home: Path
    commit: str = "aaaa111"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "FRUGAL_SOURCE": str(self.source),
            "FRUGAL_CHECKOUT": str(self.checkout),
            "FRUGAL_GIT_COMMIT": self.commit,
        }
        return subprocess.run(
            ("sh", str(SCRIPT), *command), env=environment, capture_output=True, text=True, check=False
        )

    def is_ready(self) -> str:
        """What the start says."""
        done = self.run("git", "-c", "color.ui=never", "status", "--short")
        assert done.returncode == 0, done
        return done.stderr + done.stdout

    def is_refused(self) -> str:
        done = self.run("touch", "never")
        assert done.returncode == 1 and not (self.checkout / "never").exists(), done
        assert done.stderr.startswith("frugal: ") and done.stderr.count("\n") == 1, done
        return done.stderr


@pytest.fixture
def container(tmp_path: Path) -> Container:
    """Its image has some code; the mounted folder is empty."""
    source, checkout, home = (tmp_path / name for name in ("source", "checkout", "home"))
    for folder in (source / "stages", checkout, home):
        folder.mkdir(parents=True)
    files = {
        "dvc.yaml": "stages: {}\n",
        "params.yaml": "seed: 1\n",
        "stages/a.py": "1\n",
        "stages/b.py": "2\n",
    }
    for name, text in files.items():
        (source / name).write_text(text)
    return Container(source, checkout, home)


@pytest.fixture
def next_image(container: Container, tmp_path: Path) -> Container:
    """On the folder that the first image filled: one file is new, one edited, one gone."""
    assert container.run("true").returncode == 0
    source = tmp_path / "next source"
    shutil.copytree(container.source, source)
    (source / "stages/a.py").write_text("10\n")
    (source / "stages/b.py").unlink()
    (source / "stages/c.py").write_text("3\n")
    (source / "params.yaml").write_text("seed: 2\n")
    return replace(container, source=source, commit="bbbb222")


def test_an_empty_folder_gets_the_code_once(container: Container) -> None:
    (container.checkout / "lost+found").mkdir()
    assert "was empty and has the code of this image now, commit aaaa111" in container.is_ready()
    assert (container.checkout / "stages/a.py").read_text() == "1\n"
    assert container.is_ready() == ""
    assert container.run("sh", "-c", "exit 75").returncode == 75, "the status is the command's"


def test_a_fill_that_was_killed_is_done_again(container: Container) -> None:
    assert container.run("true").returncode == 0
    (container.checkout / ".frugal-unfinished").touch()
    (container.checkout / "stages/a.py").unlink()
    assert "has the code of this image now" in container.is_ready()
    assert (container.checkout / "stages/a.py").exists()
    assert not (container.checkout / ".frugal-unfinished").exists()


def test_a_strange_folder_is_left_alone(container: Container) -> None:
    (container.checkout / "thesis.tex").touch()
    assert "is not empty (thesis.tex) and has no dvc.yaml" in container.is_refused()
    assert [path.name for path in container.checkout.iterdir()] == ["thesis.tex"]


def test_a_later_image_brings_its_code_and_leaves_params_and_results(next_image: Container) -> None:
    (next_image.checkout / "params.yaml").write_text("seed: 7\n")
    (next_image.checkout / "dvc.lock").write_text("of the user\n")
    said = next_image.is_ready()
    assert "has this one's now, commit bbbb222; params.yaml and dvc.lock are as they were" in said
    stages = {path.name: path.read_text() for path in (next_image.checkout / "stages").iterdir()}
    assert stages == {"a.py": "10\n", "c.py": "3\n"}
    assert (next_image.checkout / "params.yaml").read_text() == "seed: 7\n"
    assert (next_image.checkout / "dvc.lock").read_text() == "of the user\n"
    assert next_image.is_ready() == " M params.yaml\n?? dvc.lock\n"


@pytest.mark.parametrize("edited", ["stages/a.py", "stages/c.py"])
def test_edits_of_the_user_are_not_overwritten(next_image: Container, edited: str) -> None:
    (next_image.checkout / edited).write_text("mine\n")
    told = next_image.is_refused()
    assert f"edits of yours, which this image would overwrite: {edited};" in told
    assert "use the image of commit aaaa111" in told
    assert (next_image.checkout / edited).read_text() == "mine\n"


def test_the_code_stays_while_the_pipeline_runs_in_it(next_image: Container) -> None:
    lock = next_image.checkout / ".work/repro.lock"
    lock.parent.mkdir()
    lock.touch()
    running = subprocess.Popen(("flock", "--shared", lock, "sh", "-c", "echo held; read x"),
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert running.stdout is not None and running.stdout.readline() == b"held\n"
    assert "a container of that image runs the pipeline in it" in next_image.is_refused()
    running.communicate(b"\n")
    assert "has this one's now" in next_image.is_ready()


def test_a_clone_is_used_as_it_is(container: Container) -> None:
    clone = container.checkout
    (clone / "dvc.yaml").write_text("stages: {}\n")
    assert "is no git repository" in container.is_refused()
    subprocess.run(("git", "init", "--quiet", clone), check=True)
    assert container.is_ready() == "?? dvc.yaml\n"


def test_a_container_killed_while_it_changed_the_code_keeps_no_lock(next_image: Container) -> None:
    (next_image.checkout / ".git/index.lock").touch()
    done = next_image.run("true")
    assert done.returncode == 0, done.stderr
    assert (next_image.checkout / "stages/a.py").read_text() == "10\n"
