"""The watch on torch.compile, on real compilations."""

import subprocess
import sys

import pytest
import torch

from stages.measure import CompileWatch


def test_nothing_compiled_is_zero() -> None:
    with CompileWatch() as watch:
        torch.ones(3).sum()
        watch.mark_steady()
    assert (watch.compilations, watch.recompiles, watch.compile_seconds) == (0, 0, 0.0)


def test_off_imports_no_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from stages.measure import CompileWatch\n"
        "with CompileWatch(enabled=False) as watch: watch.mark_steady()\n"
        "assert watch.compile_seconds == 0.0\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compilations_and_recompiles(backend: str) -> None:
    torch._dynamo.reset()

    def double(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin().sum()

    compiled = torch.compile(double, backend=backend)
    with CompileWatch() as watch:
        compiled(torch.randn(8, requires_grad=True)).backward()
        assert watch.compilations == 1  # the backward graph belongs to the same frame
        first = watch.compile_seconds
        assert first > 0
        watch.mark_steady()
        compiled(torch.randn(8, requires_grad=True)).backward()
        assert (watch.recompiles, watch.compile_seconds) == (0, first)
        compiled(torch.randn(8, dtype=torch.float64, requires_grad=True)).backward()
        assert (watch.compilations, watch.recompiles) == (2, 1)
        assert watch.compile_seconds > first
    after = watch.compile_seconds
    compiled(torch.randn(8, dtype=torch.float16))
    assert (watch.compilations, watch.compile_seconds) == (2, after)  # the watch has ended


def test_leaves_no_callback_behind_even_after_a_reset() -> None:
    from torch._dynamo.callback import callback_handler

    before = len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)
    with CompileWatch():
        assert len(callback_handler.start_callbacks) == before[0] + 1
    assert (len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)) == before
    with CompileWatch():
        torch._dynamo.reset()
    assert not callback_handler.start_callbacks
