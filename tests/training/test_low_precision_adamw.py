"""AdamW with bfloat16 weights or 8-bit moments, against torch's AdamW in fp32."""

from pathlib import Path

import pytest
import torch

from stages.measure.peak_memory import measure_peak
from stages.training.low_precision_adamw import LowPrecisionAdamW
from tests.training.optimizer_runs import optimizer_run, state_bytes
from tests.training.small_run import CPU, bit_equal, distance, weights

BF16 = torch.bfloat16


def ours(
    parameters: list[torch.Tensor], rate: float | torch.Tensor, quantized: bool = False, beta2: float = 0.95
) -> LowPrecisionAdamW:
    groups = [{"params": parameters, "weight_decay": 0.1}]
    rate = torch.as_tensor(rate)
    return LowPrecisionAdamW(
        groups, learning_rate=rate, betas=(0.9, beta2), epsilon=1e-8, quantized=quantized
    )


def reference(parameters: list[torch.Tensor], rate: float, beta2: float = 0.95) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, beta2), eps=1e-8, weight_decay=0.1, foreach=False
    )


def gradients(shape: tuple[int, ...], steps: int) -> list[torch.Tensor]:
    """A direction that stays, and noise."""
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(shape, generator=generator)
    return [direction + torch.randn(shape, generator=generator) for _ in range(steps)]


def stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, steps: list[torch.Tensor]) -> None:
    for gradient in steps:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("shape", [(40,), (7, 9), (3000, 64)], ids=str)
def test_in_fp32_it_is_adamw(shape: tuple[int, ...]) -> None:
    """The arithmetic, with nothing rounded; (3000, 64) is cut into pieces."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found, expected = start.clone(), start.clone()
    steps = gradients(shape, 6)
    stepped(ours([found], 0.01), found, steps)
    stepped(reference([expected], 0.01), expected, steps)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_the_learning_rate_is_read_from_its_tensor() -> None:
    rate = torch.tensor(0.0)
    parameter = torch.ones(4)
    optimizer = ours([parameter], rate)
    stepped(optimizer, parameter, [torch.ones(4)])
    assert torch.equal(parameter, torch.ones(4))
    rate.fill_(0.25)
    stepped(optimizer, parameter, [torch.ones(4)])
    torch.testing.assert_close(parameter, torch.full((4,), 1 - 0.25 * 0.1 - 0.25))


def test_bf16_weights_see_small_updates_and_torchs_do_not() -> None:
    """300 steps of a learning rate of 1e-4 down from 1.0; a constant gradient makes Adam's update 1."""
    torch.manual_seed(0)
    nearest = torch.ones(10_000, dtype=BF16)
    stochastic = torch.ones(10_000, dtype=BF16)
    torch_adamw = torch.optim.AdamW([nearest], lr=1e-4, weight_decay=0.0, fused=True)
    optimizer = ours([stochastic], 1e-4)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    constant = [torch.ones(10_000)] * 300
    stepped(torch_adamw, nearest, constant)
    stepped(optimizer, stochastic, constant)
    assert (nearest == 1.0).all()
    assert float(stochastic.double().mean()) == pytest.approx(0.97, abs=3e-4)


def test_a_bf16_second_moment_decays_and_torchs_does_not() -> None:
    """One gradient of 1, then zeros: beta2 0.999 takes less than half the gap to the next number."""
    torch.manual_seed(0)
    parameters = [torch.zeros(10_000, dtype=BF16) for _ in range(2)]
    torch_adamw = torch.optim.AdamW([parameters[0]], betas=(0.9, 0.999), fused=True)
    optimizer = ours([parameters[1]], 1e-4, beta2=0.999)
    one_then_zeros = [torch.ones(10_000)] + [torch.zeros(10_000)] * 300
    stepped(torch_adamw, parameters[0], one_then_zeros)
    stepped(optimizer, parameters[1], one_then_zeros)
    stuck = torch_adamw.state[parameters[0]]["exp_avg_sq"].double()
    decayed = optimizer.state[parameters[1]]["exp_avg_sq"].double()
    assert float(stuck.mean()) == pytest.approx(0.001, rel=0.01)
    assert float(decayed.mean()) == pytest.approx(0.001 * 0.999**300, rel=0.01)


def test_the_state_of_bf16_is_bf16() -> None:
    parameter = torch.zeros(100, 64, dtype=BF16)
    optimizer = ours([parameter], 0.01)
    stepped(optimizer, parameter, gradients((100, 64), 1))
    state = optimizer.state[parameter]
    assert {key: tensor.dtype for key, tensor in state.items()} == {
        "step": torch.float32,
        "exp_avg": BF16,
        "exp_avg_sq": BF16,
    }
    assert state_bytes(optimizer, parameter) == 4 * parameter.numel()


def test_what_is_not_finite_reaches_the_weight() -> None:
    parameter = torch.ones(3, dtype=BF16)
    stepped(ours([parameter], 0.01), parameter, [torch.tensor([1.0, float("nan"), float("inf")])])
    assert parameter.isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("shape", "bytes_of_state"),
    [
        ((64, 512), 2 * 64 * 512 + 2 * 4 * 64 * 2),  # two blocks in a row
        ((64, 192), 2 * 64 * 192 + 2 * 4 * 64),  # a row shorter than a block
        ((64, 300), 2 * 64 * 300 + 2 * 4 * 64 * 2),  # a block and a piece of one
        ((63, 64), 8 * 63 * 64),  # below 4096 numbers: fp32
        ((8192,), 8 * 8192),  # a vector: fp32
    ],
    ids=str,
)
def test_bytes_of_eight_bit_state(shape: tuple[int, ...], bytes_of_state: int) -> None:
    parameter = torch.zeros(shape)
    optimizer = ours([parameter], 0.01, quantized=True)
    stepped(optimizer, parameter, gradients(shape, 1))
    assert state_bytes(optimizer, parameter) == bytes_of_state
    if len(shape) == 2 and shape[1] == 512:
        assert bytes_of_state / parameter.numel() == 2 + 8 / 256


def test_eight_bits_follow_fp32() -> None:
    start = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    found, expected = start.clone(), start.clone()
    steps = gradients((64, 512), 40)
    stepped(ours([found], 0.01, quantized=True), found, steps)
    stepped(reference([expected], 0.01), expected, steps)
    moved = (expected - start).norm()
    assert 0 < (found - expected).norm() / moved < 0.03


def test_eight_bits_survive_gradients_of_many_sizes() -> None:
    """Columns whose gradients differ by 1e5 share a block. Rounded to 0, a second moment would make the
    update of the small ones m / epsilon, thousands of learning rates."""
    scale = 10 ** torch.linspace(-5, 0, 256)
    start = torch.zeros(64, 256)
    found, expected = start.clone(), start.clone()
    steps = [gradient * scale for gradient in gradients((64, 256), 20)]
    stepped(ours([found], 0.01, quantized=True), found, steps)
    stepped(reference([expected], 0.01), expected, steps)
    assert float(found.abs().max()) < 1.5 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("quantized", [False, True])
def test_temporaries_are_of_a_piece_and_not_of_a_parameter(dtype: torch.dtype, quantized: bool) -> None:
    parameter = torch.zeros(4096, 256, dtype=dtype)  # 16 pieces
    parameter.grad = torch.ones_like(parameter)
    optimizer = ours([parameter], 0.01, quantized=quantized)
    optimizer.step()
    kept = 2 * parameter.nbytes + sum(tensor.nbytes for tensor in optimizer.state[parameter].values())
    peak = measure_peak(CPU, optimizer.step).bytes
    assert peak - kept < 12 * 4 * 2**16, "a dozen fp32 pieces"
    assert peak - kept < 4 * parameter.numel(), "less than the parameter in fp32"


def test_a_step_that_overflowed_changes_nothing() -> None:
    """The scaler's verdict, as GradScaler.step hands it over."""
    parameters = [torch.randn(64, 128), torch.randn(20)]
    optimizer = ours(parameters, 0.01, quantized=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()

    def everything() -> dict[str, torch.Tensor]:
        kept = {f"weight {i}": p.clone() for i, p in enumerate(parameters)}
        for i, parameter in enumerate(parameters):
            kept |= {f"{i} {key}": t.clone() for key, t in optimizer.state[parameter].items()}
        return kept

    before = everything()
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad[0] = float("inf")
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert bit_equal(everything(), before)
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert not bit_equal(everything(), before)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_with_and_without_unscale(unscale: bool) -> None:
    found, expected = torch.ones(64, 128), torch.ones(64, 128)
    gradient = torch.randn(64, 128)
    optimizer = ours([found], 0.01, quantized=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    found.grad = gradient * 1024
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    stepped(ours([expected], 0.01, quantized=True), expected, [gradient])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("variant", "tolerance"), [({"precision": "bf16"}, 0.06), ({"optimizer": "adamw_8bit"}, 0.02)], ids=str
)
def test_training_follows_adamw(tmp_path: Path, variant: dict[str, object], tolerance: float) -> None:
    run, exact = (optimizer_run(tmp_path, v) for v in (variant, {}))
    losses = [(float(run.step().loss), float(exact.step().loss)) for _ in range(20)]
    assert losses[-1][1] < 0.75 * losses[0][1]
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=tolerance)
    as_fp32 = {name: tensor.float() for name, tensor in weights(run.state).items()}
    assert 0 < distance(as_fp32, weights(exact.state)) < 0.2


def test_eight_bits_under_the_scaler(tmp_path: Path) -> None:
    """The first overflows skip, then training follows fp32."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    variant = {"optimizer": "adamw_8bit", "precision": "amp_fp16", "micro_batch_size": 4}
    run = optimizer_run(tmp_path, variant, scaler)
    before = weights(run.state)
    while int(run.state.schedule.steps_taken) == 0:
        assert bit_equal(weights(run.state), before)
        run.step()
    skipped = int(run.state.skipped_steps)
    assert skipped > 0
    assert {int(state["step"]) for state in run.state.optimizer.state.values()} == {1}
    losses = [float(run.step().loss) for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]
