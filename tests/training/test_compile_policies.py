"""Every recompute policy with every way to compile: one graph, one compilation, the same gradients.

`without_code_generation` leaves out only the writing and building of kernels; the slow tests do that too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.measure.compilation import CompileWatch
from stages.training.compilation import apply_compile
from stages.training.precision import apply_precision
from stages.training.recompute import apply_recompute
from tests.training.small_run import SmallRun, distance, small_params, small_run

POLICIES = ["none", "every_block", {"every_n_blocks": 2}, "selective", {"budget": 0.0}]


def prepared(folder: Path, variant: dict[str, Any], **training: Any) -> SmallRun:
    """In the order of the train stage: weights, precision, recompute, compile."""
    run = small_run(folder, small_params({"micro_batch_size": 4} | variant, **training))
    apply_precision(run.state.model, run.policy)
    apply_recompute(run.state.model, run.variant)
    apply_compile(run.state.model, run.variant)
    return run


@pytest.mark.parametrize("compile", ["blocks", "model"])
@pytest.mark.parametrize("recompute", POLICIES, ids=str)
def test_gradients_of_policies(
    tmp_path: Path, compile: str, recompute: Any, without_code_generation: None
) -> None:
    expected = prepared(tmp_path / "plain", {}).gradients()
    run = prepared(tmp_path / "compiled", {"compile": compile, "recompute": recompute, "loss": "chunked"})
    assert distance(run.gradients(), expected) < 1e-5
    assert not any("_orig_mod" in name for name in run.state.model.state_dict())


@pytest.mark.parametrize("sequences", ["packed", "padded"])
@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize(
    ("variant", "graphs"),
    [
        ({"compile": "blocks", "recompute": "selective", "precision": "amp_bf16"}, 1),
        ({"compile": "blocks", "recompute": {"every_n_blocks": 2}}, 2),
        ({"compile": "model", "precision": "bf16"}, 1),
    ],
    ids=str,
)
def test_no_graph_break_and_no_recompilation(
    tmp_path: Path,
    variant: dict[str, Any],
    graphs: int,
    loss: str,
    sequences: str,
    without_code_generation: None,
) -> None:
    """The number of documents of a batch varies; the fixture makes of a graph break an error."""
    run = prepared(tmp_path, {"loss": loss} | variant, sequences=sequences)
    documents = set()
    with CompileWatch() as watch:
        for _ in range(4):
            documents |= {
                None if batch.cu_seqlens is None else len(batch.cu_seqlens) for batch in run.micro_batches()
            }
            run.step()
            watch.mark_steady()
    assert len(documents) > 2 if sequences == "packed" else documents == {None}
    assert (watch.compilations, watch.recompiles) == (graphs, 0)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [{"recompute": "selective", "precision": "amp_bf16"}, {"recompute": {"budget": 0.5}}],
    ids=str,
)
def test_generated_code_keeps_gradients(tmp_path: Path, variant: dict[str, Any]) -> None:
    torch._dynamo.reset()
    expected = prepared(tmp_path / "plain", {key: variant[key] for key in variant if key == "precision"})
    run = prepared(tmp_path / "compiled", {"compile": "blocks", "loss": "chunked"} | variant)
    # Generated code rounds to bf16 less often than operators one by one do.
    tolerance = 0.03 if "precision" in variant else 1e-5
    assert distance(run.gradients(), expected.gradients()) < tolerance
    torch._dynamo.reset()


ONE_RUN = """
import json, sys, torch
from pathlib import Path
from stages.training.compile_cache import compiling, use_compile_cache
use_compile_cache(Path(sys.argv[1]))
from tests.training.test_compile_policies import prepared
run = prepared(Path(sys.argv[2]), json.loads(sys.argv[3]))
with compiling(Path(sys.argv[1]) / "inductor"):
    loss = float(run.step().loss)
counters = torch._dynamo.utils.counters
misses = counters["inductor"]["fxgraph_cache_miss"]
print(json.dumps({"loss": loss, "misses": misses, "aot": dict(counters["aot_autograd"])}))
"""


def in_a_process(tmp_path: Path, name: str, recompute: str = "none") -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "TRITON"))}
    variant = json.dumps({"compile": "blocks", "recompute": recompute})
    return subprocess.run(
        [sys.executable, "-c", ONE_RUN, str(tmp_path / "cache"), str(tmp_path / name), variant],
        env=environment | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
    )


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_second_process_starts_warm(tmp_path: Path, recompute: str) -> None:
    """Also with selective recompute, which is cached only because its policy has a hash of its own."""
    cold, warm = (figures(in_a_process(tmp_path, name, recompute)) for name in ("cold", "warm"))
    assert cold["aot"]["autograd_cache_miss"] == 1 and cold["misses"] > 0
    assert warm["aot"]["autograd_cache_hit"] == 1 and "autograd_cache_bypass" not in warm["aot"]
    assert warm["misses"] == 0
    assert warm["loss"] == cold["loss"]


@pytest.mark.slow
def test_a_library_that_a_killed_compiler_left_is_not_loaded(tmp_path: Path) -> None:
    """Cut short as `kill -9` of the process group leaves it; a marker without a process says since when."""
    cold = figures(in_a_process(tmp_path, "cold"))
    cache = tmp_path / "cache" / "inductor"
    assert not list(cache.glob("compiling-*")), "what went well leaves no marker"
    library = max(cache.rglob("*.so"), key=lambda path: path.stat().st_mtime)
    whole = library.stat().st_size
    os.truncate(library, 100)
    stuck = in_a_process(tmp_path, "stuck")
    assert stuck.returncode != 0 and library.name in stuck.stderr, "else this test shows nothing"
    # That process died while compiling, so its own marker is there.
    (marker,) = cache.glob("compiling-*")
    os.utime(marker, (0, 0))
    again = figures(in_a_process(tmp_path, "again"))
    assert again["loss"] == cold["loss"]
    assert library.stat().st_size == whole
    assert not list(cache.glob("compiling-*"))
