"""Peak memory on the CPU, against cases counted by hand."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from stages.measure import measure_peak
from stages.measure.peak_memory import CPU_KIND, live_cpu_blocks, peak_rss_bytes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine threads wait for each other longer than these sizes take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def live_bytes() -> int:
    return sum(live_cpu_blocks().values())


def test_sequence_of_allocations() -> None:
    def step() -> None:
        a = torch.empty(1000)  # 4000
        b = torch.empty(2000)  # 12000, the peak
        del a  # 8000
        c = torch.empty(500)  # 10000
        del b, c

    before = live_bytes()
    peak = measure_peak(CPU, step)
    assert peak.bytes - before == 12_000
    assert peak.kind == CPU_KIND
    assert peak.reserved_bytes is None
    assert peak_rss_bytes() > 50e6


def test_memory_that_stays_is_counted() -> None:
    kept = [torch.empty(100)]
    before = live_bytes()
    assert measure_peak(CPU, lambda: kept.append(torch.empty(300))).bytes == before + 1200
    assert live_bytes() == before + 1200


def test_a_block_from_before_the_step_is_released_in_it() -> None:
    """The profiler is silent about this release; without the marker the peak would be 60,000."""
    box = [torch.empty(10_000)]

    def step() -> None:
        box.clear()
        torch.empty(5_000)

    before = live_bytes()
    assert before >= 40_000
    assert measure_peak(CPU, step).bytes == before


def test_backward_releases_what_the_graph_saved() -> None:
    """Saved: exp's output (40,000). At its fullest exp's backward has that, the gradient that comes
    in and the one that goes out (120,000), beside the loss and backward's first gradient (8)."""
    w = torch.ones(100, 100, requires_grad=True)
    w.grad = torch.zeros(100, 100)
    before = live_bytes()
    peak = measure_peak(CPU, lambda: (w.exp() * 2.0).sum().backward())
    assert peak.bytes - before == 120_008
    assert live_bytes() == before


def test_repeated_measurements_agree_though_addresses_are_used_again() -> None:
    box: list[torch.Tensor] = []

    def step() -> None:
        box.clear()
        box.append(torch.empty(2_500))
        torch.empty(1_000)

    peaks = []
    for size in (5_000, 2_500, 2_500, 7_000, 2_500):
        box[:] = [torch.empty(size)]
        others = live_bytes() - 4 * size
        peaks.append(measure_peak(CPU, step).bytes - others)
    assert peaks == [20_000, 14_000, 14_000, 28_000, 14_000]


def test_mlp_step_counted_by_hand() -> None:
    """Linear 64-256, ReLU, Linear 256-64 without bias, 32 rows, fp32, gradients from the step before.

    At its fullest the old gradients are gone, both new ones are there (131,072 bytes together), and
    so is the gradient of ReLU's output (32 x 256 x 4 = 32,768). What lived before the step includes
    as many bytes of old gradients, so the peak is 32,768 above it, and two scalars: the loss and
    the gradient that backward starts from.
    """
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
    x = torch.randn(32, 64)
    optimizer = torch.optim.AdamW(mlp.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        mlp(x).square().mean().backward()
        optimizer.step()

    step()
    weights = 2 * 64 * 256 * 4
    before = live_bytes()
    assert measure_peak(CPU, step).bytes - before == 32 * 256 * 4 + 8
    assert live_bytes() == before
    assert before >= 4 * weights + x.nbytes


@pytest.mark.parametrize(("fused", "extra"), [(True, 0), (False, 1)])
def test_fused_adamw_steps_in_place(fused: bool, extra: int) -> None:
    weight = nn.Parameter(torch.zeros(300, 100))
    weight.grad = torch.ones(300, 100)
    optimizer = torch.optim.AdamW([weight], fused=fused, foreach=not fused)
    optimizer.step()
    before = live_bytes()
    temporaries = measure_peak(CPU, optimizer.step).bytes - before
    assert temporaries < 100 if extra == 0 else temporaries >= extra * weight.nbytes


def test_only_blocks_of_torchs_allocator_count() -> None:
    before = live_bytes()
    array = torch.from_numpy(np.zeros(10_000))
    tensor = torch.zeros(10)
    views = [tensor[:5], tensor.view(2, 5)]
    assert live_bytes() - before == 40
    del array, views


def test_gradient_without_a_python_object_counts() -> None:
    before = live_bytes()
    weight = torch.ones(1000, requires_grad=True)
    weight.sum().backward()
    assert live_bytes() - before == 8000


def test_objects_that_raise_when_asked_for_their_class() -> None:
    class Hostile:
        @property  # type: ignore[misc]
        def __class__(self):
            raise RuntimeError("not loaded")

    hostile = [Hostile()]
    assert live_bytes() >= 0
    del hostile


def test_an_error_in_the_step_passes_through() -> None:
    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_peak(CPU, step)
    assert measure_peak(CPU, lambda: None).bytes >= 0


def test_leaves_no_output_and_no_files(tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from stages.measure import measure_peak\n"
        "box = [torch.ones(100)]\n"
        "measure_peak(torch.device('cpu'), box.clear)\n"
    )
    environment = {
        k: v for k, v in os.environ.items() if k not in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL")
    }
    environment["PYTHONPATH"] = str(Path.cwd())
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == result.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_peak() -> None:
    device = torch.device("cuda")
    before = torch.cuda.memory_allocated(device)
    peak = measure_peak(device, lambda: torch.empty(2**20, device=device))
    assert peak.bytes == before + 2**22
    assert peak.reserved_bytes is not None and peak.reserved_bytes >= peak.bytes
    assert peak.kind == "cuda: max_memory_allocated"
