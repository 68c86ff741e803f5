import subprocess
from pathlib import Path

import pytest

from stages.tracking import outs_md5_tags, provenance_tags


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    for name in ("params.yaml", "dvc.lock", "results/plan.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("first")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_a_clean_commit(repository: Path) -> None:
    tags = provenance_tags(repository)
    assert tags["git.commit"] == git(repository, "rev-parse", "HEAD")
    assert tags["git.dirty"] == "false"


@pytest.mark.parametrize(
    ("file", "dirty"),
    [("params.yaml", "true"), ("dvc.lock", "false"), ("results/plan.json", "false"), ("new.txt", "false")],
)
def test_dirty_means_that_what_people_write_was_changed(repository: Path, file: str, dirty: str) -> None:
    (repository / file).write_text("second")
    assert provenance_tags(repository)["git.dirty"] == dirty
    assert provenance_tags(repository / "results")["git.dirty"] == dirty


def test_no_repository_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "git.commit" not in provenance_tags(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git.commit" not in provenance_tags(tmp_path)


def test_dvc_says_which_stage_and_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_STAGE", "train@baseline")
    monkeypatch.setenv("DVC_EXP_NAME", "dusty-moon")
    tags = provenance_tags(tmp_path)
    assert (tags["dvc.stage"], tags["dvc.experiment"]) == ("train@baseline", "dusty-moon")
    monkeypatch.delenv("DVC_STAGE")
    monkeypatch.delenv("DVC_EXP_NAME")
    assert not {"dvc.stage", "dvc.experiment"} & provenance_tags(tmp_path).keys()


LOCK = """\
schema: '2.0'
stages:
  train@baseline:
    cmd: python -m stages.train baseline
    outs:
    - {path: models/baseline, hash: md5, md5: 0f3a.dir, size: 12, nfiles: 3}
    - {path: results/curves/baseline.csv, hash: md5, md5: 77bc, size: 9}
    - {path: not-cached}
"""


def test_md5_of_the_outs(tmp_path: Path) -> None:
    lock = tmp_path / "dvc.lock"
    lock.write_text(LOCK)
    assert outs_md5_tags("train@baseline", lock) == {
        "md5.models/baseline": "0f3a.dir",
        "md5.results/curves/baseline.csv": "77bc",
    }


@pytest.mark.parametrize("text", [None, "", "stages: [", LOCK.replace("baseline:", "other:"), "stages: 3"])
def test_no_md5_where_the_lock_does_not_have_it(tmp_path: Path, text: str | None) -> None:
    lock = tmp_path / "dvc.lock"
    if text is not None:
        lock.write_text(text)
    assert outs_md5_tags("train@baseline", lock) == {}
