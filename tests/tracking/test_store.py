import subprocess
import sys
from pathlib import Path

import pytest

from stages.tracking.store import in_words, project_root, store_from_environment, work_root


def test_dvc_root_comes_before_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `dvc exp run --temp` the current folder is a throw-away copy."""
    copy, real = tmp_path / "copy", tmp_path / "real"
    (copy / ".dvc").mkdir(parents=True)
    real.mkdir()
    monkeypatch.chdir(copy)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    assert project_root() == copy
    monkeypatch.setenv("DVC_ROOT", str(real))
    assert project_root() == real
    assert work_root() == real / ".work"


def test_the_root_is_found_from_a_folder_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "docs" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "docs" / "images")
    monkeypatch.delenv("DVC_ROOT", raising=False)
    assert project_root() == tmp_path


def test_messages_and_files_never_hold_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@mlflow.example.org:5000/path?token=secret")
    store = store_from_environment()
    assert store.name == "https://mlflow.example.org:5000/path"
    assert "secret" in store.uri


def test_errors_become_one_short_line() -> None:
    refused = "API request failed with exception HTTPConnectionPool(...): [Errno 111] Connection refused"
    assert in_words(RuntimeError(refused)) == "connection refused"
    assert in_words(RuntimeError("two\nlines")) == "two lines"
    assert len(in_words(RuntimeError("x" * 5000))) == 200
    assert in_words(RuntimeError()) == "RuntimeError"


def test_the_trainer_does_not_import_mlflow() -> None:
    code = "import sys, stages.tracking; sys.exit(any(m.split('.')[0] == 'mlflow' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_three_processes_on_a_fresh_database_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    command = [sys.executable, "-m", "stages.tracking.initialise"]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    said = [process.communicate() for process in processes]
    assert said == [("tracking: mlflow.db is ready\n", "")] * 3
    assert [process.returncode for process in processes] == [0, 0, 0]
