"""The plan stage, run in a folder of its own."""

import json
from pathlib import Path

import pytest

from stages.measure.targets import TARGETS
from stages.params import load_params
from stages.plan import COMMON_TARGETS, COMPONENTS, main
from stages.report.memory_timeline import read_memory_timeline

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
        assert plan["method"] == "traced"
        assert plan["techniques"] == recipe.model_dump(mode="json")
        assert (plan["device"], plan["target"], plan["capacity_bytes"], plan["fits"]) == ("cpu", *[None] * 3)
        assert "hardware.target names no GPU" in plan["forecast"]["none"]
        timeline = read_memory_timeline(Path(f"results/plan/{variant}.timeline.csv").read_text())
        assert timeline.total.max() == plan["predicted_peak_memory_bytes"]
        assert timeline.phases[timeline.peak] == plan["peak_moment"]


def test_same_params_same_bytes() -> None:
    folder = Path("results/plan")
    main(["baseline"])
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    main(["baseline"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert first.keys() == {"baseline.json", "baseline.timeline.csv"}


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
    for target in COMMON_TARGETS:
        assert TARGETS[target].label in printed
    assert not Path("results").exists()


GPU = "hardware:\n  device: cuda\n  target: rtx_3060_12gb\n  price_per_hour: 0.5\n"


def aim(project: Path, hardware: str, variants: str = "") -> None:
    """The default params with another hardware section and, where given, other variants."""
    text = (project / "params.yaml").read_text()
    start, end = text.index("hardware:"), text.index("tracking:")
    text = text[:start] + hardware + text[end:]
    if variants:
        text = text[: text.index("variants:")] + f"variants:\n{variants}"
    (project / "params.yaml").write_text(text)


def test_auto_is_decided_and_written_down(project: Path) -> None:
    aim(project, GPU, "  v: {fit: auto, precision: amp_bf16}\n  w: {micro_batch_size: auto}\n")
    assert main(["v"]) == main(["w"]) == 0
    plan = json.loads(Path("results/plan/v.json").read_text())
    assert (plan["target"], plan["device"], plan["fits"]) == ("rtx_3060_12gb", "cuda", True)
    assert plan["capacity_bytes"] == TARGETS["rtx_3060_12gb"].memory_bytes - 2**28
    assert plan["techniques"]["precision"] == "amp_bf16"
    assert plan["micro_batch_size"] == plan["largest_micro_batch_that_fits"] == 8
    (chosen,) = [entry for entry in plan["considered"] if entry["verdict"] == "chosen"]
    assert {key: plan["techniques"][key] for key in ("recompute", "loss")} == {
        key: chosen[key] for key in ("recompute", "loss")
    }
    assert len(plan["considered"]) == 6
    allowances = sum(plan["allowances"].values())
    assert plan["needed_memory_bytes"] == plan["predicted_peak_memory_bytes"] + allowances
    best, worst = plan["forecast"]["tokens_per_second"]
    assert best > worst > 0
    assert plan["forecast"]["cost_per_billion_tokens"][0] == pytest.approx(0.5e9 / 3600 / best, rel=1e-3)


def test_what_does_not_fit_is_said_and_planned_all_the_same(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aim(project, "hardware: {device: cpu, memory_gib: 0.08, memory_reserve_gib: 0}\n")
    assert main(["baseline"]) == 0
    plan = json.loads(Path("results/plan/baseline.json").read_text())
    assert plan["fits"] is False
    largest, next_larger = plan["largest_micro_batch_that_fits"], plan["next_larger"]
    assert 1 <= largest < next_larger["micro_batch_size"] <= 8
    assert next_larger["needed_memory_bytes"] > plan["capacity_bytes"]
    assert f"does NOT fit 81.9 MiB: set micro_batch_size: {largest}" in capsys.readouterr().out


def test_nothing_that_fits_is_an_error(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aim(project, "hardware: {device: cpu, memory_gib: 0.01, memory_reserve_gib: 0}\n", "  v: {fit: auto}\n")
    assert main(["v"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("variants.v: nothing fits 10.2 MiB") and error.count("\n") == 1
    assert not Path("results").exists()


def test_a_precision_that_the_target_lacks(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aim(project, GPU.replace("rtx_3060_12gb", "t4"))
    assert main(["frugal"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("variants.frugal: precision: amp_bf16 needs compute capability 8.0 and T4 has")


def test_targets_as_columns(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aim(project, GPU, "  v: {micro_batch_size: 8}\n  w: {fit: auto}\n")
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "RTX 3060" in printed and "RTX 4090" not in printed
    assert main(["--target", "h200", "--target", "l4"]) == 0
    printed = capsys.readouterr().out
    assert "H200" in printed and "L4" in printed and "RTX" not in printed
    assert "tokens/s" in printed and "forecast" in printed and "max 8" in printed
    assert main(["--target", "h2000"]) == 1
    assert "did you mean h200 or b200?" in capsys.readouterr().err
    assert main(["v", "--target", "h200"]) == 1
    assert "set hardware.target there" in capsys.readouterr().err


def test_explain_draws_a_step(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--explain", "frugal"]) == 0
    assert Path("results/explain/frugal.png").read_bytes().startswith(b"\x89PNG")
    assert "frugal: fullest at " in capsys.readouterr().out
    assert main(["--explain", "frugal", "--target", "rtx_3060_12gb", "--out", "drawn.png"]) == 0
    assert Path("drawn.png").read_bytes() != Path("results/explain/frugal.png").read_bytes()
    assert main(["--explain", "frugl"]) == 1
    assert "did you mean frugal?" in capsys.readouterr().err


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
