"""Every params file that is shipped loads, and its variants fit the card that it is named after."""

import re
from pathlib import Path

import pytest

from stages.measure import parameter_count
from stages.memory.fit import Predictions, fit_variant
from stages.memory.machine import machine_of
from stages.memory.prediction import MemoryPrediction
from stages.params import HardwareParams, HubCorpus, Params, load_params

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "presets").glob("*.yaml"))


def test_there_are_presets() -> None:
    assert {path.name for path in PRESETS} >= {"gpu_12gb.yaml", "gpu_24gb.yaml", "gpu_80gb.yaml"}


def test_the_default_params_load() -> None:
    assert load_params(ROOT / "params.yaml").variants


@pytest.fixture(params=PRESETS, ids=lambda path: path.name)
def preset(request: pytest.FixtureRequest) -> tuple[Path, Params]:
    return request.param, load_params(request.param)


def test_is_the_tutorials_model_on_pinned_text(preset: tuple[Path, Params]) -> None:
    path, params = preset
    assert parameter_count(params.model, params.tokenizer.vocab_size) == pytest.approx(179.5e6, rel=0.01)
    assert isinstance(params.corpus, HubCorpus)
    assert re.fullmatch("[0-9a-f]{40}", params.corpus.revision)
    # FineWeb's documents have about 680 tokens: enough of them that no token is seen twice.
    assert params.corpus.max_documents is not None
    assert params.corpus.max_documents * 680 >= params.training.token_budget
    assert params.corpus.max_documents / params.corpus.validation_every >= 1000
    assert f"cp presets/{path.name} params.yaml && dvc repro" in path.read_text()


def test_holds_the_named_variants(preset: tuple[Path, Params]) -> None:
    _, params = preset
    variants = params.variants
    assert next(iter(variants)) == "baseline"
    assert {"baseline", "amp_checkpointing", "compiled_accumulated", "frugal"} <= set(variants)
    assert any(variant.precision == "amp_fp16" for variant in variants.values())
    assert variants["baseline"].precision == "fp32"
    assert params.accumulation_steps("compiled_accumulated") > 1


MADE: dict[object, MemoryPrediction] = {}
CARDS = {"12gb": "rtx_3060_12gb", "24gb": "rtx_4090", "80gb": "a100_80gb"}


@pytest.mark.slow  # six traces of the reference model each
def test_fits_the_card(preset: tuple[Path, Params]) -> None:
    """With all allowances and the reserve."""
    path, params = preset
    machine = machine_of(HardwareParams(target=CARDS[path.stem.removeprefix("gpu_")]))  # type: ignore[arg-type]
    predictions = Predictions(params, machine, made=MADE)
    recipes = {name: fit_variant(predictions, name).recipe for name in params.variants}
    too_large = {
        name: predictions.needed_bytes(recipe)
        for name, recipe in recipes.items()
        if not predictions.fits(recipe)
    }
    assert too_large == {}


def test_comments_count_the_steps(preset: tuple[Path, Params]) -> None:
    path, params = preset
    assert f"{params.training.num_steps:,} steps" in path.read_text()
    tokens = params.training.global_batch_size * params.training.sequence_length
    assert f"{tokens:,} tokens in one optimizer step" in path.read_text()
