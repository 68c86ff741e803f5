"""Disks that are full, read-only or gone under a training: what stays whole, what is said, how it goes on."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stages.training.checksums import read_checked
from tests.faults.killed_pipeline import result_hashes
from tests.faults.own_mounts import NoMountsError, OwnMounts, own_mounts
from tests.faults.stage_process import StageProcess, results
from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow

BALLOON = "balloon"


@pytest.fixture
def mounts() -> Iterator[OwnMounts]:
    try:
        with own_mounts() as found:
            yield found
    except NoMountsError as error:
        pytest.skip(f"nothing can be mounted here, so no disk can be made full: {error}")


@pytest.fixture(scope="module")
def reference(tokenized: Repository, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Hashes in dvc.lock of an uninterrupted training and what it needs."""
    repository = tokenized.copy_to(tmp_path_factory.mktemp("reference") / "repository")
    repository.dvc("repro", "train@baseline")
    return result_hashes(repository)


def repro(repository: Repository, prefix: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*prefix, "dvc", "repro", "train@baseline"),
        cwd=repository.root,
        env=repository.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def whole_checkpoints(work: Path) -> list[Path]:
    """Each one's checksums are right; nothing half is beside them."""
    folders = sorted(work.glob("train/baseline/*/step-*"))
    for folder in folders:
        read_checked(folder)
    return folders


def start_and_fill(repository: Repository, mounts: OwnMounts, disk: Path) -> StageProcess:
    """A training whose disk another program fills after the first checkpoint."""
    process = StageProcess(repository, "train", "baseline", prefix=mounts.prefix(repository.root))
    process.root = mounts.seen(repository.root)
    process.wait_for_checkpoint()
    with (mounts.seen(disk) / BALLOON).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    return process


def test_a_full_disk_under_the_checkpoints(
    repository: Repository, mounts: OwnMounts, reference: dict[str, dict[str, str]]
) -> None:
    work = repository.root / ".work"
    mounts.small_disk(work, "4m")
    process = start_and_fill(repository, mounts, work)
    ended = process.end()
    assert ended.status == 1, ended
    *warnings, last = ended.errors()
    assert "Traceback" not in ended.stderr
    folder = re.escape(str(work / "train/baseline/"))
    reason = r"(\[Errno 28\] No space left on device|.* cannot be written: .*)"
    assert warnings and all(
        re.fullmatch(
            rf"train baseline: no checkpoint could be written \({reason}.*\); the one before is whole and "
            "training goes on",
            line,
        )
        for line in warnings
    ), ended
    assert re.search(rf"train baseline: .*{folder}.*; mend that and run `dvc repro`: it goes on", last), ended
    seen = mounts.seen(work)
    kept = whole_checkpoints(seen)
    assert kept and not list(seen.glob("train/baseline/*/.step-*"))
    assert not (repository.root / "models/baseline").exists()

    (seen / BALLOON).unlink()
    done = repro(repository, mounts.prefix(repository.root))
    assert done.returncode == 0, done
    assert f"going on after step {int(kept[-1].name.removeprefix('step-'))} of 600" in done.stdout
    assert result_hashes(repository) == reference


def test_a_full_disk_under_the_models(
    repository: Repository, mounts: OwnMounts, reference: dict[str, dict[str, str]]
) -> None:
    """Another disk than the work folder's, so that the files must be copied to it."""
    models = repository.root / "models"
    mounts.small_disk(models, "200k")
    failed = repro(repository, mounts.prefix(repository.root))
    assert failed.returncode != 0
    assert "Traceback" not in failed.stderr
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("train baseline: ")]
    assert "No space left on device" in line and "models/" in line, line
    assert line.endswith("mend that and run `dvc repro`: it goes on from the last checkpoint")
    assert list(mounts.seen(models).iterdir()) == []
    assert whole_checkpoints(repository.root / ".work")

    mounts.resize(models, "8m")
    done = repro(repository, mounts.prefix(repository.root))
    assert done.returncode == 0, done
    assert "was complete; its outs are published" in done.stdout
    assert result_hashes(repository) == reference


@pytest.mark.parametrize("folder", [".work", "models"])
def test_a_read_only_folder(repository: Repository, mounts: OwnMounts, folder: str) -> None:
    place = repository.root / folder
    place.mkdir(exist_ok=True)
    repository.edit_params(lambda params: params["training"].update(token_budget=32 * 4 * 40))
    mounts.read_only(place)
    ended = StageProcess(repository, "train", "baseline", prefix=mounts.prefix(repository.root)).end()
    assert ended.status == 1, ended
    (line,) = ended.errors()
    assert "Read-only file system" in line and str(folder) in line, line
    assert not (repository.root / "models/baseline").exists()

    mounts.writable(place)
    ended = StageProcess(repository, "train", "baseline", prefix=mounts.prefix(repository.root)).end()
    assert ended.status == 0, ended


def test_a_work_folder_that_is_deleted(repository: Repository, uninterrupted: dict[str, str]) -> None:
    process = StageProcess(repository, "train", "baseline")
    process.wait_for_checkpoint()
    (work,) = (repository.root / ".work/train/baseline").iterdir()
    shutil.rmtree(repository.root / ".work/train", ignore_errors=True)
    ended = process.end()
    assert ended.status == 0, ended
    assert ended.errors() == [
        f"train baseline: {work} was deleted while training; it is made again, its checkpoints are lost"
    ]
    assert results(repository.root, "baseline") == uninterrupted
