"""`dvc push` and `dvc pull` over S3, from one machine to another; commands as in docs/cloud.md."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cloud.s3_server import BUCKET, S3Server, s3_server
from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow

FOLDER = "frugal"
STAGES = ("tokenize", "plan@baseline", "train@baseline", "evaluate@baseline", "compare")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(autouse=True)
def account(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are in the environment, and nowhere else."""
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def _add_remote(repository: Repository, bucket: str = BUCKET) -> None:
    repository.dvc("remote", "add", "--default", "storage", f"s3://{bucket}/{FOLDER}")


def _contents(repository: Repository) -> Mapping[str, str]:
    """SHA-256 by path of every file in the outs that dvc.lock names for the stages there are."""
    outs = [repository.root / out for stage in STAGES for out in repository.out_hashes(stage)]
    files = [path for out in outs for path in ([out] if out.is_file() else sorted(out.rglob("*")))]
    return {
        str(path.relative_to(repository.root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.is_file()
    }


def test_results_that_were_pushed_are_pulled_on_another_machine(
    baseline_only: Repository, server: S3Server, tmp_path: Path
) -> None:
    _add_remote(baseline_only)
    # What removed variants left behind is in no remote, and `compare` depends on whole folders.
    for folder in ("models", "results"):
        shutil.rmtree(baseline_only.root / folder)
    baseline_only.dvc("checkout", "--allow-missing")
    baseline_only.repro()
    baseline_only.commit("a remote")
    baseline_only.dvc("push")
    there = {key.rpartition("files/md5/")[2].replace("/", "") for key in server.objects()}
    hashes = {md5 for stage in STAGES for md5 in baseline_only.out_hashes(stage).values()}
    assert hashes <= there
    assert "Everything is up to date" in baseline_only.dvc("push")
    secrets = (server.secret, server.key_id)
    settings = [path.read_text() for path in (baseline_only.root / ".dvc").glob("config*")]
    assert settings and not any(secret in text for text in settings for secret in secrets)

    # Another folder above it: DVC keeps nothing in common with the first but what is in git and in S3.
    machine = Repository(tmp_path / "another" / "repository")
    baseline_only.run("git", "clone", "--quiet", str(baseline_only.root), str(machine.root))
    assert not (machine.root / "models").exists()
    machine.dvc("pull")
    assert machine.out_hashes("train@baseline") == baseline_only.out_hashes("train@baseline")
    pulled = _contents(machine)
    assert "models/baseline/model.safetensors" in pulled
    assert pulled == _contents(baseline_only)
    assert machine.repro() == set()

    # Evaluated here, from the weights that were pulled: the same numbers.
    before = machine.out_hashes("evaluate@baseline")
    assert machine.repro("--force", "--single-item", "evaluate@baseline") == {"evaluate@baseline"}
    assert machine.out_hashes("evaluate@baseline") == before


@pytest.mark.parametrize(
    ("keys", "bucket", "expected"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, BUCKET, "Forbidden"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, BUCKET, "Unable to locate credentials"),
        ({}, "no-such-bucket", "bucket does not exist"),
    ],
    ids=["wrong secret", "no keys", "no bucket"],
)
def test_what_keeps_a_push_from_working_is_said(
    baseline_only: Repository,
    monkeypatch: pytest.MonkeyPatch,
    keys: Mapping[str, str],
    bucket: str,
    expected: str,
) -> None:
    _add_remote(baseline_only, bucket)
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    done = baseline_only.run("dvc", "push", "train@baseline", may_fail=True)
    assert done.returncode != 0
    assert expected in done.stderr and "Traceback" not in done.stderr, done.stderr
