"""Every params file that is shipped loads, and its variants fit the card that it is named after."""

import re
from pathlib import Path

import pytest

from stages.measure import parameter_count
from stages.memory import predict
from stages.params import HubCorpus, Params, load_params

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "presets").glob("*.yaml"))
GIB = 2**30


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


def test_fits_the_card(preset: tuple[Path, Params]) -> None:
    """With a fifth left over, for CUDA itself, libraries, fragmentation and the desktop."""
    path, params = preset
    found = re.search(r"(\d+)gb", path.name)
    assert found is not None
    for name, variant in params.variants.items():
        peak = predict(params.model, params.tokenizer.vocab_size, params.training, variant, "cuda")
        assert peak.peak_bytes < 0.8 * int(found[1]) * 1e9, name


def test_comments_count_the_steps(preset: tuple[Path, Params]) -> None:
    path, params = preset
    assert f"{params.training.num_steps:,} steps" in path.read_text()
    tokens = params.training.global_batch_size * params.training.sequence_length
    assert f"{tokens:,} tokens in one optimizer step" in path.read_text()
