"""What evaluate says of a model that is not worth comparing, and of memory that runs out."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import stages.evaluate
from tests.faults.stage_process import StageProcess
from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow


@pytest.fixture
def repository(trained: Repository, tmp_path: Path) -> Repository:
    return trained.copy_to(tmp_path / "repository")


@pytest.mark.parametrize("factor", [1e6, float("inf")])
def test_a_diverged_model_is_named(repository: Repository, factor: float) -> None:
    """A learning rate that is far too high may end in finite weights, whose perplexity is no number."""
    path = repository.root / "models/baseline/model.safetensors"
    weights = load_file(path)
    path.unlink()
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * factor}, path)
    ended = StageProcess(repository, "evaluate", "baseline").end()
    assert ended.status == 1
    (line,) = ended.errors()
    assert re.fullmatch(
        r"evaluate baseline: the validation loss is \S+ nats per token, so the training diverged; "
        r"lower training\.learning_rate or change the variant's precision",
        line,
    ), ended
    assert not (repository.root / "results/evaluate/baseline.json").exists()


def test_memory_that_runs_out_names_the_batch_size(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An allocation that the allocator really refuses, in the place of the stage's."""
    monkeypatch.chdir(repository.root)
    monkeypatch.setattr(stages.evaluate, "evaluate", lambda *_: torch.empty(2**60, dtype=torch.uint8))
    assert stages.evaluate.main(["baseline"]) == 1
    assert re.fullmatch(
        r"evaluate baseline: out of memory: [\d.]+ \wiB could not be had beside [\d.]+ \w*B in use; "
        r"lower evaluation\.batch_size, which is \d+, or free memory\n",
        capsys.readouterr().err,
    )
