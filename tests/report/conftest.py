from pathlib import Path

import pytest

from stages.report.rows import Comparison
from tests.report.variant_results import build, write_results


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Of the four default variants, with the current folder where their files are."""
    write_results(tmp_path)
    monkeypatch.chdir(tmp_path)
    return build()
