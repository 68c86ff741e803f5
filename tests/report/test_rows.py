import json
from pathlib import Path
from typing import Any

import pytest

from stages.report.bootstrap import BootstrapError
from stages.report.inputs import Device, InputError
from stages.report.rows import ComparisonError, Row, device_name
from tests.report.variant_results import build, edit_json, write_documents, write_results

_CONTRACT = [
    "variant", "precision", "recompute", "compile", "micro_batch_size", "accumulation_steps", "tokens",
    "validation_bits_per_byte", "delta_bits_per_byte", "delta_ci95", "tokens_per_second", "speedup",
    "peak_memory_bytes", "peak_memory_kind", "memory_saved", "predicted_peak_memory_bytes",
    "prediction_error", "mfu",
    "compile_seconds", "skipped_steps", "device", "seed",
]  # fmt: skip


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_results(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fields_are_the_contract() -> None:
    assert list(Row.model_fields) == _CONTRACT


def test_rows(results: Path) -> None:
    comparison = build()
    baseline, amp, compiled, frugal = comparison.rows
    assert [row.variant for row in comparison.rows] == [
        "baseline",
        "amp_checkpointing",
        "compiled_accumulated",
        "frugal",
    ]
    assert (baseline.delta_bits_per_byte, baseline.delta_ci95) == (0.0, (0.0, 0.0))
    assert (baseline.speedup, baseline.memory_saved) == (1.0, 0.0)
    assert amp.speedup == pytest.approx(11_900 / 9_800)
    assert frugal.memory_saved == pytest.approx(1 - 79 / 612, abs=1e-6)
    assert (amp.recompute, compiled.compile, compiled.accumulation_steps) == ("every_block", "blocks", 4)
    assert frugal.delta_bits_per_byte == pytest.approx(
        frugal.validation_bits_per_byte - baseline.validation_bits_per_byte, abs=1e-9
    )
    assert frugal.delta_ci95 is not None
    assert frugal.delta_ci95[0] < frugal.delta_bits_per_byte < frugal.delta_ci95[1]
    assert {row.device for row in comparison.rows} == {"CPU (AMD EPYC, 2 threads)"}


def test_order_and_reference_come_from_the_params(results: Path) -> None:
    text = Path("params.yaml").read_text()
    start = text.index("  frugal:")
    frugal = text[start:]
    Path("params.yaml").write_text(text[:start].replace("variants:\n", f"variants:\n{frugal}"))
    comparison = build()
    assert [row.variant for row in comparison.rows][:2] == ["frugal", "baseline"]
    assert comparison.rows[1].memory_saved == pytest.approx(1 - 612 / 79, abs=1e-6)


def test_removed_variant_is_not_shown(results: Path) -> None:
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text[: text.index("  frugal:")])
    assert "frugal" not in [row.variant for row in build().rows]


def test_another_device_gets_no_ratio(results: Path) -> None:
    edit_json(
        Path("results/measurements/frugal.json"),
        device={"kind": "cuda", "name": "NVIDIA H200", "threads": 16},
        peak_memory_kind="max_memory_allocated",
    )
    comparison = build()
    frugal = comparison.rows[3]
    assert (frugal.speedup, frugal.memory_saved, frugal.device) == (None, None, "NVIDIA H200")
    assert frugal.delta_ci95 is not None
    assert comparison.rows[1].speedup is not None
    assert comparison.devices == ("CPU (AMD EPYC, 2 threads)", "NVIDIA H200")


def test_the_prediction_is_held_against_the_measurement(results: Path) -> None:
    errors = [row.prediction_error for row in build().rows]
    assert errors == pytest.approx([604 / 612 - 1, 383 / 371 - 1, 176 / 168 - 1, 74 / 79 - 1], abs=1e-6)
    # The allocator's share is part of what a GPU's measurement counts.
    edit_json(Path("results/plan/baseline.json"), predicted_allocated_bytes=612 * 2**20)
    baseline = build().rows[0]
    assert (baseline.prediction_error, baseline.predicted_peak_memory_bytes) == (0.0, 612 * 2**20)


def test_no_error_where_something_else_was_planned(results: Path) -> None:
    edit_json(Path("results/plan/frugal.json"), device="cuda")
    edit_json(Path("models/baseline/training.json"), micro_batch_size=8, accumulation_steps=2)
    baseline, amp, _, frugal = build().rows
    assert (baseline.prediction_error, frugal.prediction_error) == (None, None)
    assert amp.prediction_error is not None


def test_memory_measured_in_another_way_gets_no_ratio(results: Path) -> None:
    edit_json(Path("results/measurements/frugal.json"), peak_memory_kind="resident set")
    frugal = build().rows[3]
    assert frugal.memory_saved is None
    assert frugal.speedup is not None


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (Device(kind="cuda", name="NVIDIA A100-SXM4-80GB", threads=8), "NVIDIA A100-SXM4-80GB"),
        (Device(kind="cpu", name="Intel(R) Xeon(R) CPU @ 2.20GHz", threads=1), "CPU (Intel Xeon, 1 thread)"),
        (Device(kind="cpu", name="AMD Ryzen 7 5800X 8-Core Processor"), "CPU (AMD Ryzen 7 5800X 8-Core)"),
        (Device(kind="cpu", name=""), "CPU"),
    ],
)
def test_device_name(device: Device, name: str) -> None:
    assert device_name(device) == name


def test_unequal_tokens_are_refused(results: Path) -> None:
    edit_json(Path("models/frugal/training.json"), tokens=500_000)
    with pytest.raises(ComparisonError, match=r"frugal 500,000\).*single-item train@frugal`"):
        build()


def test_another_seed_is_refused(results: Path) -> None:
    edit_json(Path("models/frugal/training.json"), seed=1)
    with pytest.raises(ComparisonError, match=r"seed 1337.*frugal 1; run `dvc repro train@frugal`"):
        build()


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        ("results/plan/frugal.json", {"micro_batch_size": 8}, "plan@frugal ran with micro_batch_size 8"),
        ("models/frugal/training.json", {"precision": "fp32"}, "params.yaml says amp_bf16"),
    ],
)
def test_results_of_older_params_are_refused(
    results: Path, path: str, changes: dict[str, Any], message: str
) -> None:
    edit_json(Path(path), **changes)
    with pytest.raises(ComparisonError, match=message):
        build()


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("results/plan/frugal.json", "plan@frugal"),
        ("results/plan/frugal.timeline.csv", "plan@frugal"),
        ("models/frugal/training.json", "train@frugal"),
        ("results/curves/frugal.csv", "train@frugal"),
        ("results/measurements/frugal.json", "train@frugal"),
        ("results/measurements/frugal.csv", "train@frugal"),
        ("results/evaluate/frugal.json", "evaluate@frugal"),
        ("results/evaluate/frugal.documents.csv", "evaluate@frugal"),
    ],
)
def test_every_broken_file_is_named_with_its_stage(results: Path, path: str, target: str) -> None:
    whole = Path(path).read_text()
    Path(path).write_text(whole[: len(whole) // 3].rstrip("0123456789.,-\n") + "\x00")
    with pytest.raises(InputError, match=rf"^{path}: .*dvc repro --force --single-item {target}`"):
        build()
    Path(path).unlink()
    with pytest.raises(InputError, match=rf"^{path}: no such file; run `dvc repro {target}`$"):
        build()


def test_wrong_type_is_named_by_key(results: Path) -> None:
    edit_json(Path("results/measurements/frugal.json"), tokens_per_second="fast")
    with pytest.raises(InputError, match=r"tokens_per_second: .*found 'fast'"):
        build()


def test_file_of_another_variant_is_refused(results: Path) -> None:
    Path("results/plan/frugal.json").write_text(Path("results/plan/baseline.json").read_text())
    with pytest.raises(InputError, match="about the variant 'baseline', not 'frugal'"):
        build()


def test_documents_that_do_not_add_up_are_refused(results: Path) -> None:
    edit_json(Path("results/evaluate/frugal.json"), bits_per_byte=1.4)
    with pytest.raises(InputError, match=r"of different runs; run `dvc repro --force.*evaluate@frugal`"):
        build()


def test_diverged_training_is_named(results: Path) -> None:
    path = Path("results/evaluate/frugal.documents.csv")
    lines = path.read_text().splitlines()
    lines[3] = lines[3].rsplit(",", 1)[0] + ",nan"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match="the training of frugal diverged"):
        build()


def test_other_documents_are_refused(results: Path) -> None:
    losses = build().results["frugal"].losses
    write_documents(results, "frugal", losses.bytes[:20], losses.nats[:20])
    bpb = float(losses.nats[:20].sum() / losses.bytes[:20].sum() / 0.6931471805599453)
    edit_json(Path("results/evaluate/frugal.json"), bits_per_byte=bpb, documents=20)
    with pytest.raises(BootstrapError, match="25 and 20 validation documents"):
        build()


def test_seconds_are_joined_to_the_curve_by_step(results: Path) -> None:
    path = Path("results/measurements/baseline.csv")
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *rows[2:-1:3], rows[-1]]))
    curve = build().results["baseline"].curve
    assert curve.seconds == pytest.approx(curve.steps * 16 * 256 / 9_800, abs=0.01)


def test_timeline_that_ends_early_is_refused(results: Path) -> None:
    path = Path("results/measurements/baseline.csv")
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(InputError, match=r"ends at step 240 and results/curves/baseline.csv at step 245"):
        build()


def test_row_is_plain_json(results: Path) -> None:
    row = build().rows[3].model_dump(mode="json")
    assert list(row) == _CONTRACT
    assert isinstance(row["delta_ci95"], list)
    json.dumps(row, allow_nan=False)
