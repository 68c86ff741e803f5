"""Ranks on GPUs, over NCCL: the same curve as one rank on the CPU."""

from pathlib import Path

import pytest
import torch

from tests.training.rank_runs import Case, curves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [
    Case({"micro_batch_size": 2}),
    Case({"micro_batch_size": 1, "recompute": "every_block"}, {"sequences": "padded"}),
    Case({"micro_batch_size": 2, "parallelism": "fsdp"}),
    Case({"micro_batch_size": 1, "parallelism": "fsdp", "recompute": "every_block", "loss": "chunked"}),
    Case({"micro_batch_size": 2, "parallelism": "fsdp_cpu_offload"}),
    Case({"micro_batch_size": 2, "parallelism": "fsdp", "compile": "blocks"}),
    Case({"micro_batch_size": 1, "parallelism": "fsdp", "precision": "amp_bf16"}),
    Case({"micro_batch_size": 1, "parallelism": "fsdp", "precision": "amp_fp16"}),
    Case({"micro_batch_size": 1, "precision": "amp_bf16", "compile": "blocks"}),
]
RANKS = [
    pytest.param(count, marks=pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"{count} GPUs"))
    for count in (1, 2, 4)
]


@pytest.mark.parametrize("ranks", RANKS)
def test_the_curve_is_that_of_one_rank_on_the_cpu(tmp_path: Path, ranks: int) -> None:
    """CUDA's attention kernels need a head of 8 channels at least; the small model has that."""
    expected = curves(
        tmp_path / "cpu",
        1,
        [
            Case(
                case.techniques | {"parallelism": "ddp", "micro_batch_size": 8, "compile": "off"},
                case.training,
            )
            for case in CASES
        ],
    )
    found = curves(tmp_path / "cuda", ranks, CASES, device="cuda")
    for case, mine, theirs in zip(CASES, found, expected, strict=True):
        # Sums in another order and other kernels' rounding, grown over 20 steps.
        tolerance = 1e-3 if case.techniques.get("precision", "fp32") == "fp32" else 2e-2
        assert [row[0] for row in mine] == [row[0] for row in theirs], case
        assert [row[1] for row in mine] == pytest.approx([row[1] for row in theirs], rel=tolerance), case
