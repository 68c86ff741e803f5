"""Recompute changes no gradient by a bit, saves what it promises and computes what it must."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stages.data.sequences import MicroBatch
from stages.model.llama import Block, Llama
from stages.params import VariantParams
from stages.training.recompute import apply_recompute
from tests.training.small_run import SmallRun, bit_equal, small_params, small_run, weights

LAYERS = 4
EVERY_OTHER = {"every_n_blocks": 2}


def run_with(folder: Path, recompute: Any, **variant: Any) -> SmallRun:
    params = small_params({"recompute": recompute, **variant}, model={"num_hidden_layers": LAYERS})
    run = small_run(folder, params)
    apply_recompute(run.state.model, run.variant)
    return run


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
@pytest.mark.parametrize("recompute", ["every_block", EVERY_OTHER, {"every_n_blocks": 3}], ids=str)
def test_gradients_are_the_same_bits(tmp_path: Path, precision: str, recompute: Any) -> None:
    plain = run_with(tmp_path, "none", precision=precision, micro_batch_size=4)
    run = run_with(tmp_path, recompute, precision=precision, micro_batch_size=4)
    for _ in range(2):
        assert bit_equal(run.gradients(), plain.gradients())
    assert bit_equal(weights(run.state), weights(plain.state))


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ("none", 0),
        ("every_block", 4),
        (EVERY_OTHER, 2),
        ({"every_n_blocks": 3}, 2),
        ({"every_n_blocks": 9}, 1),
    ],
    ids=str,
)
def test_how_many_blocks_recompute(recompute: Any, expected: int) -> None:
    params = small_params(model={"num_hidden_layers": LAYERS})
    model = Llama(params.model, 64)
    names = list(model.state_dict())
    variant = VariantParams(micro_batch_size=1, recompute=recompute)
    assert apply_recompute(model, variant) == expected
    assert list(model.state_dict()) == names


def saved_bytes(run: SmallRun, batch: MicroBatch) -> int:
    """Bytes that the forward pass keeps for backward, parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in run.state.model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = run.state.model(batch.input_ids_BS, batch.cu_seqlens)
    assert hidden.requires_grad
    return sum(saved.values())


def test_saved_bytes_fall_to_the_blocks_inputs(tmp_path: Path) -> None:
    runs = {str(r): run_with(tmp_path, r) for r in ("none", EVERY_OTHER, "every_block")}
    batch = runs["none"].micro_batches(0)[0]
    none, half, every = (saved_bytes(run, batch) for run in runs.values())
    block_input = batch.input_ids_BS.numel() * 32 * 4
    # The blocks' inputs, the final norm's input and statistics, the tables and the token ids.
    assert LAYERS * block_input <= every < (LAYERS + 2.5) * block_input
    assert none > 3 * every
    assert half == pytest.approx((none + every) / 2, rel=0.02)


def flops(run: SmallRun, batch: MicroBatch) -> int:
    with FlopCounterMode(display=False) as counter:
        run.state.model(batch.input_ids_BS, batch.cu_seqlens).sum().backward()
    return int(counter.get_total_flops())


def test_flops_rise_by_the_blocks_forward(tmp_path: Path) -> None:
    runs = {str(r): run_with(tmp_path, r) for r in ("none", EVERY_OTHER, "every_block")}
    batch = runs["none"].micro_batches(0)[0]
    none, half, every = (flops(run, batch) for run in runs.values())
    tokens, D, F = batch.input_ids_BS.numel(), 32, 48
    # qkv (4 + 2 x 2 heads of 8), o and gate-up. The product with down_proj is a block's last: nobody
    # needs its output, so recomputation stops before it. Attention is not counted on a CPU.
    recomputed = 2 * tokens * (D * 64 + D * D + D * 2 * F)
    assert every - none == LAYERS * recomputed
    assert half - none == LAYERS // 2 * recomputed


def test_nothing_is_recomputed_without_gradients(tmp_path: Path) -> None:
    run, plain = run_with(tmp_path, "every_block"), run_with(tmp_path, "none")
    batch = run.micro_batches(0)[0]
    with torch.no_grad():
        assert torch.equal(run.state.model(batch.input_ids_BS), plain.state.model(batch.input_ids_BS))


def test_random_numbers_are_the_same_in_the_second_forward(tmp_path: Path) -> None:
    """There is no dropout today; what a block draws must be drawn again."""
    run = run_with(tmp_path, "none")
    drawn: list[torch.Tensor] = []
    block = run.state.model.layers[1]
    assert isinstance(block, Block)
    forward = block.mlp.forward

    def noisy(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(3))
        return forward(x)

    block.mlp.forward = noisy  # type: ignore[method-assign, assignment]
    apply_recompute(run.state.model, VariantParams(micro_batch_size=1, recompute="every_block"))
    run.step()
    assert len(drawn) == 2
    assert torch.equal(drawn[0], drawn[1])
