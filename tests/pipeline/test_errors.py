"""Mistakes end with one clear sentence and a failing status, through the real commands."""

import pytest

from tests.pipeline.small_repository import Repository

pytestmark = pytest.mark.slow

STAGES = (
    ("tokenize_data",),
    ("plan", "baseline"),
    ("train", "baseline"),
    ("evaluate", "baseline"),
    ("compare",),
)


def _stderr_of(repository: Repository, *stage: str) -> str:
    done = repository.run("python", "-m", f"stages.{stage[0]}", *stage[1:], may_fail=True)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_every_stage_lists_everything_that_is_wrong_with_the_params(copy: Repository) -> None:
    copy.edit_params(lambda params: params["variants"]["frugal"].update(micro_batch_size=3))
    copy.edit_params(lambda params: params["variants"]["baseline"].update(precison="fp32"))
    copy.edit_params(lambda params: params["model"].update(num_key_value_heads=3))
    for stage in STAGES:
        stderr = _stderr_of(copy, *stage)
        assert "3 problems" in stderr, stage
        assert (
            "variants.frugal.micro_batch_size: 3 does not divide training.global_batch_size 4; use 1, 2 or 4"
            in stderr
        )
        assert "variants.baseline.precison: unknown key; did you mean precision?" in stderr
        assert "model.num_key_value_heads: 3 does not divide model.num_attention_heads 2" in stderr


def test_dvc_repro_stops_at_the_stage_that_failed(copy: Repository) -> None:
    copy.edit_params(lambda params: params["training"].update(learning_rate=-1))
    done = copy.run("dvc", "repro", may_fail=True)
    assert done.returncode != 0
    assert "training.learning_rate" in done.stderr
    assert "failed to reproduce 'plan@baseline'" in done.stderr and "Traceback" not in done.stderr
    assert "train@baseline" not in done.stdout


@pytest.mark.parametrize(
    ("missing", "stage"),
    [
        ("data/tokens/train.safetensors", ("train", "baseline")),
        ("data/tokens/validation.safetensors", ("evaluate", "baseline")),
        ("models/baseline/model.safetensors", ("evaluate", "baseline")),
        ("results/evaluate/frugal.json", ("compare",)),
    ],
)
def test_a_missing_file_is_named_with_what_makes_it(
    copy: Repository, missing: str, stage: tuple[str, ...]
) -> None:
    (copy.root / missing).unlink()
    stderr = _stderr_of(copy, *stage)
    assert f"{missing}: no such file" in stderr
    assert "run" in stderr or "train" in stderr
    assert len(stderr.strip().splitlines()) == 1


def test_an_unknown_variant_is_named_with_the_nearest(copy: Repository) -> None:
    assert "did you mean baseline?" in _stderr_of(copy, "train", "basline")
