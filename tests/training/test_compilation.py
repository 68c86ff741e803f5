"""torch.compile: the same training, one compilation per kind of block, none after the first step.

Compiling takes seconds even at this size, so almost everything here is slow.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.data.sequences import MicroBatch
from stages.measure.compilation import CompileWatch
from stages.measure.peak_memory import measure_peak
from stages.params import Params, VariantParams
from stages.training.checkpoint import load_checkpoint, save_checkpoint
from stages.training.compilation import apply_compile, mark_dynamic_documents
from stages.training.compile_cache import compiling, use_compile_cache
from stages.training.recompute import apply_recompute
from tests.training.small_run import CPU, SmallRun, distance, small_params, small_run, weights


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Every test compiles for itself."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def prepared(folder: Path, params: Params) -> SmallRun:
    run = small_run(folder, params)
    apply_recompute(run.state.model, run.variant)
    apply_compile(run.state.model, run.variant)
    return run


def documents_of(batch: MicroBatch) -> int:
    assert batch.cu_seqlens is not None
    return len(batch.cu_seqlens) - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "compilations"),
    [
        ({"compile": "blocks"}, 1),
        ({"compile": "blocks", "recompute": "every_block"}, 1),
        ({"compile": "blocks", "recompute": {"every_n_blocks": 2}}, 2),
        ({"compile": "blocks", "recompute": "every_block", "precision": "amp_bf16", "loss": "chunked"}, 1),
        ({"compile": "blocks", "precision": "amp_fp16"}, 1),
        ({"compile": "model"}, 1),
        ({"compile": "model", "recompute": "every_block", "precision": "amp_bf16"}, 1),
    ],
    ids=str,
)
def test_the_same_training(tmp_path: Path, changes: dict[str, Any], compilations: int) -> None:
    """Losses over 50 steps, many epochs, with as many documents in a batch as it happens to hold."""
    settings = {"model": {"num_hidden_layers": 4}, "token_budget": 50 * 8 * 16}
    off = prepared(tmp_path, small_params(changes | {"compile": "off", "micro_batch_size": 4}, **settings))
    run = prepared(tmp_path, small_params(changes | {"micro_batch_size": 4}, **settings))
    assert len({documents_of(batch) for step in range(10) for batch in run.micro_batches(step)}) > 3
    half = changes.get("precision", "fp32") != "fp32"
    with CompileWatch() as watch:
        for _ in range(50):
            expected = float(off.step().loss)
            # 16-bit intermediates that the compiler fuses away are not rounded, so AMP may differ more.
            assert float(run.step().loss) == pytest.approx(expected, rel=2e-2 if half else 1e-4)
            watch.mark_steady()
    assert watch.compilations == compilations, "blocks of one kind must share one compilation"
    assert watch.recompiles == 0, "the number of documents must not matter"
    assert watch.compile_seconds > 0
    assert distance(weights(run.state), weights(off.state)) < (0.1 if half else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("compile_", ["blocks", "model"])
def test_names_and_checkpoint_are_those_of_the_model(tmp_path: Path, compile_: str) -> None:
    params = small_params({"compile": compile_, "micro_batch_size": 4})
    run = prepared(tmp_path, params)
    run.step()
    plain = small_run(tmp_path, small_params())
    assert list(run.state.model.state_dict()) == list(plain.state.model.state_dict())
    assert [name for name, _ in run.state.model.named_parameters()] == [
        name for name, _ in plain.state.model.named_parameters()
    ]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_checkpoint(run.state, folder)
    load_checkpoint(plain.state, folder)
    assert distance(weights(plain.state), weights(run.state)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("compile_", ["blocks", "model"])
def test_recompute_survives_compilation(tmp_path: Path, compile_: str) -> None:
    """The compiler might keep what it was told to forget: the peak must fall as it does without it."""
    shape = {"num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 256}

    def peak(recompute: str) -> int:
        torch._dynamo.reset()
        run = prepared(tmp_path, small_params({"compile": compile_, "recompute": recompute}, model=shape))
        batch = run.micro_batches(0)[0]

        def forward_and_backward() -> None:
            mark_dynamic_documents(batch.cu_seqlens, run.variant)
            run.state.model(batch.input_ids_BS, batch.cu_seqlens).square().sum().backward()

        forward_and_backward()  # compiles
        run.state.model.zero_grad(set_to_none=True)
        before = measure_peak(CPU, lambda: None).bytes
        gradients = sum(p.nbytes for p in run.state.model.parameters())
        return measure_peak(CPU, forward_and_backward).bytes - before - gradients

    batch_tokens = 8 * 16
    # What one block saves at the least: gate, up (256 each), and its normed inputs, q, k, v and output.
    one_block = batch_tokens * (2 * 256 + 3 * 32) * 4
    assert peak("none") - peak("every_block") > 4 * one_block


@pytest.mark.slow
def test_one_compilation_whatever_the_number_of_layers(tmp_path: Path) -> None:
    run = prepared(tmp_path, small_params({"compile": "blocks"}, model={"num_hidden_layers": 12}))
    with CompileWatch() as watch:
        run.step()
    assert watch.compilations == 1


@pytest.mark.slow
def test_padded_sequences_compile_once(tmp_path: Path) -> None:
    params = small_params({"compile": "blocks", "micro_batch_size": 2}, sequences="padded")
    run = prepared(tmp_path, params)
    with CompileWatch() as watch:
        for _ in range(4):
            run.step()
    assert (watch.compilations, watch.recompiles) == (1, 0)


def test_off_compiles_nothing(tmp_path: Path) -> None:
    run = prepared(tmp_path, small_params({"compile": "off"}))
    with CompileWatch() as watch:
        run.step()
    assert watch.compilations == 0


def test_the_cache_goes_to_a_folder_unless_the_user_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "the users own")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    use_compile_cache(tmp_path / "cache")
    inductor = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that monkeypatch takes it away again
    assert Path(inductor) == tmp_path / "cache" / "inductor"
    assert os.environ["TRITON_CACHE_DIR"] == "the users own"
    assert (tmp_path / "cache").is_dir()


def test_the_default_that_importing_torch_writes_is_not_the_users_choice(tmp_path: Path) -> None:
    """Seen: importing the train stage named torch's folder under /tmp, and nothing was kept."""
    code = (
        "import os, stages.train; from pathlib import Path;"
        f"stages.train.use_compile_cache(Path({str(tmp_path)!r}));"
        "print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "TRITON"))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "inductor"), done.stderr


def library(cache: Path, name: str, at: float) -> Path:
    path = cache / "ab" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"a library")
    os.utime(path, (at, at))
    return path


def test_who_cleans_up_after_the_dead_leaves_what_the_living_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.training.compile_cache._PATIENCE_SECONDS", 0.3)
    dead = tmp_path / "compiling-1-abc"
    dead.touch()
    os.utime(dead, (1000, 1000))
    before, of_the_dead = library(tmp_path, "before.so", 900), library(tmp_path, "dead.so", 1100)
    with compiling(tmp_path):
        assert before.exists() and not of_the_dead.exists() and not dead.exists()
        (living,) = tmp_path.glob("compiling-*")
        os.utime(living, (2000, 2000))
        dead.touch()
        os.utime(dead, (1000, 1000))
        half, of_the_living = library(tmp_path, "half.so", 1500), library(tmp_path, "living.so", 2100)
        with compiling(tmp_path):
            assert of_the_living.exists() and not half.exists()
            assert dead.exists(), "what it left later is for a later start"
    with compiling(tmp_path):
        assert not of_the_living.exists() and not dead.exists() and before.exists()
    assert not list(tmp_path.glob("compiling-*"))


def test_documents_are_marked_only_for_the_compiler() -> None:
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    mark_dynamic_documents(None, VariantParams(micro_batch_size=1, compile="blocks"))
    mark_dynamic_documents(cu_seqlens, VariantParams(micro_batch_size=1))
    assert not hasattr(cu_seqlens, "_dynamo_dynamic_indices")
    mark_dynamic_documents(cu_seqlens, VariantParams(micro_batch_size=1, compile="blocks"))
    assert cu_seqlens._dynamo_dynamic_indices == {0}  # type: ignore[attr-defined]
