"""The plan stage, run in a folder of its own."""

import json
from pathlib import Path

import pytest

from stages.params import load_params
from stages.plan import COMPONENTS, main

PARAMS = Path(__file__).parents[1] / "params.yaml"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_bytes(PARAMS.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_writes_what_the_other_stages_read() -> None:
    params = load_params()
    for variant, recipe in params.variants.items():
        assert main([variant]) == 0
        plan = json.loads(Path(f"results/plan/{variant}.json").read_text())
        assert plan["variant"] == variant
        assert plan["micro_batch_size"] == recipe.micro_batch_size
        accumulated = plan["micro_batch_size"] * plan["accumulation_steps"]
        assert accumulated == params.training.global_batch_size
        assert plan["sequence_length"] == params.training.sequence_length
        assert tuple(plan["components"]) == COMPONENTS
        assert sum(plan["components"].values()) == plan["predicted_peak_memory_bytes"]
        tokens = params.training.global_batch_size * params.training.sequence_length
        assert plan["step_model_flops"] == tokens * plan["model_flops_per_token"]
        assert 1e6 < plan["parameter_count"] < 1e7
        assert plan["method"] == "analytic"


def test_same_params_same_bytes() -> None:
    path = Path("results/plan/baseline.json")
    main(["baseline"])
    first = path.read_bytes()
    main(["baseline"])
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]


def test_a_plan_does_not_depend_on_the_other_variants(project: Path) -> None:
    main(["frugal"])
    before = Path("results/plan/frugal.json").read_bytes()
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text + "  another:\n    micro_batch_size: 2\n")
    main(["frugal"])
    assert Path("results/plan/frugal.json").read_bytes() == before


@pytest.mark.parametrize(
    "techniques",
    [
        "precision: bf16",
        "precision: amp_fp16\n    recompute: selective",
        "compile: blocks\n    recompute: {budget: 0.5}",
        "optimizer: adamw_8bit\n    recompute: {every_n_blocks: 2}",
        "optimizer: muon\n    loss: chunked",
    ],
)
def test_plans_every_technique(techniques: str, project: Path) -> None:
    text = (project / "params.yaml").read_text()
    whole_batch = load_params().training.global_batch_size
    text += f"  leaner:\n    micro_batch_size: {whole_batch}\n    {techniques}\n"
    (project / "params.yaml").write_text(text)
    assert main(["leaner"]) == 0
    leaner = json.loads(Path("results/plan/leaner.json").read_text())
    assert sum(leaner["components"].values()) == leaner["predicted_peak_memory_bytes"]
    main(["baseline"])
    baseline = json.loads(Path("results/plan/baseline.json").read_text())
    assert leaner["predicted_peak_memory_bytes"] < baseline["predicted_peak_memory_bytes"]
    assert leaner["step_model_flops"] == baseline["step_model_flops"], "recomputed work is not counted"


def test_without_a_variant_prints_all_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    for variant in load_params().variants:
        assert variant in printed
    assert "MiB" in printed
    assert not Path("results").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("basline", "did you mean baseline?"), ("xyz", "known keys: baseline, amp_checkpointing")],
)
def test_unknown_variant(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 1
    error = capsys.readouterr().err
    assert f"variants.{name}: no such variant; {hint}" in error
    assert "Traceback" not in error
    assert not Path("results").exists()


def test_wrong_params(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "params.yaml").write_text("seed: -1\n")
    assert main(["baseline"]) == 1
    error = capsys.readouterr().err
    assert "seed: input should be greater than or equal to 0, found -1" in error
    assert main(["baseline", "--params", "nowhere.yaml"]) == 1
    assert "nowhere.yaml: 1 problem" in capsys.readouterr().err


def test_results_cannot_be_written(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "results").write_text("a file where the folder belongs")
    assert main(["baseline"]) == 1
    assert "cannot write the plan" in capsys.readouterr().err
