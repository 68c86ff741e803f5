"""MLflow is imported, which takes seconds, only where its database is not known to be ready."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.pipeline_process import run

_SCRIPT = "import sys; from stages.tracking.initialise import main; main(); print('mlflow' in sys.modules)"


@pytest.mark.slow
def test_a_database_that_is_ready_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    environment = os.environ | {"DVC_ROOT": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}

    def imports_mlflow() -> bool:
        ready, imported = run((sys.executable, "-c", _SCRIPT), tmp_path, environment).output.splitlines()
        assert ready == "tracking: mlflow.db is ready"
        return imported == "True"

    assert imports_mlflow()
    assert not imports_mlflow()
    (tmp_path / "mlflow.db").write_bytes(b"")  # another database, with no schema
    assert imports_mlflow()
    assert not imports_mlflow()
