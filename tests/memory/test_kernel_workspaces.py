"""What kernels hold inside, as the plan says it, against what they allocate."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.plan_accuracy import without_onednn
from stages.measure.peak_memory import live_cpu_blocks, measure_peak
from stages.memory.kernel_workspaces import workspace_bytes

CPU = torch.device("cpu")
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
BATCH, HEADS, KV_HEADS, CHANNELS = 2, 4, 2, 16


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with without_onednn():  # what it packs, it allocates as well
        yield request.param
    torch.set_num_threads(before)


# Blocks of 32, 64 and 256 queries, and sequences shorter than their blocks.
@pytest.mark.parametrize("positions", [20, 100, 191, 192, 600, 768, 900])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_cpus_flash_kernel_holds(positions: int, dtype: torch.dtype, threads: int) -> None:
    # In memory as the model has them, [B, S, H, E].
    q, k, v = (
        torch.zeros(BATCH, positions, heads, CHANNELS, dtype=dtype).transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    out, logsumexp = FORWARD(q, k, v, 0.0, True)
    # What a thread beside the first one allocates itself, the profiler does not see: a number for each query
    # of a block, backward.
    unseen = 4 * 256 * (threads - 1)
    for operator, arguments, invisible in (
        (FORWARD, (q, k, v, 0.0, True), 0),
        (BACKWARD, (out, q, k, v, out, logsumexp, 0.0, True), unseen),
    ):
        before = sum(live_cpu_blocks().values())
        peak = measure_peak(CPU, lambda operator=operator, arguments=arguments: operator(*arguments)).bytes
        result = operator(*arguments)
        results = sum(tensor.nbytes for tensor in result)
        inside = workspace_bytes("cpu", threads, operator.default, arguments, result)
        assert inside > 0
        assert inside - invisible <= peak - before - results <= inside, operator


def test_a_gpu_that_few_heads_leave_idle_adds_up_in_more_pieces() -> None:
    """Of the deterministic kernel, for each of 4 sequences' 3 heads and every multiprocessor beyond them."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    q = torch.empty(4, 3, 512, 64, dtype=torch.bfloat16, device="meta")
    needed = [workspace_bytes("cuda", count, operator, (q, q, q, q), None) for count in (1, 12, 13, 24, 25)]
    piece = 4 * q.numel()
    assert [after - needed[0] for after in needed] == [0, 0, piece, piece, 2 * piece]


@pytest.mark.parametrize(
    ("dtype", "channels", "tiles", "of_keys"),
    [(torch.float32, 64, 2, 0), (torch.float16, 96, 4, 0), (torch.float16, 160, 6, 2 * 4 * 128 * 256)],
)
def test_the_memory_efficient_kernel_has_tiles_of_the_longest_document(
    dtype: torch.dtype, channels: int, tiles: int, of_keys: int
) -> None:
    q = torch.empty(1, 300, 3, channels, dtype=dtype, device="meta")
    starts = torch.empty(6, dtype=torch.int32, device="meta")
    arguments = (q, q, q, q, None, q, starts, starts, 100, 100)
    operator = torch.ops.aten._efficient_attention_backward.default
    found = workspace_bytes("cuda", 1, operator, arguments, None)
    assert found == 4 * 300 * 3 + 5 * 3 * (tiles * (4 * 64 * 64 + 16) + of_keys)
