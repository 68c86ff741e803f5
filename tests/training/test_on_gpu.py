"""The engine on CUDA: the same training as on the CPU, with the kernels it promises and without waiting.

The CPU's tests hold the CPU against outside oracles; these hold CUDA against the CPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.data.sequences import MicroBatch
from stages.measure.peak_memory import measure_peak
from stages.model.attention import attention_kernel, causal_attention
from stages.model.hugging_face import to_hugging_face
from stages.params import HardwareParams, Params, VariantParams
from stages.training.compilation import apply_compile
from stages.training.determinism import use_deterministic_kernels
from stages.training.recompute import apply_recompute
from stages.training.state import initial_state
from stages.training.step import StepOutcome, train_step
from tests.training.small_run import SmallRun, bit_equal, distance, small_params, small_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
# Relative L2 distance of all gradients from fp32's: a few roundings of each format.
TOLERANCE = {"fp32": 1e-5, "tf32": 5e-3, "amp_bf16": 4e-2, "amp_fp16": 6e-3, "bf16": 6e-2, "fp8": 0.2}


def on_cuda(params: Params, techniques: dict[str, Any]) -> Params:
    """The same params for a GPU; read past the rules for a CPU."""
    variant = VariantParams(**({"micro_batch_size": 8} | techniques))
    return params.model_copy(update={"hardware": HardwareParams(device="cuda"), "variants": {"v": variant}})


def moved(batch: MicroBatch) -> MicroBatch:
    cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.to(CUDA)
    return replace(
        batch,
        input_ids_BS=batch.input_ids_BS.to(CUDA),
        targets_BS=batch.targets_BS.to(CUDA),
        cu_seqlens=cu_seqlens,
    )


@pytest.fixture(autouse=True)
def no_determinism_left_behind() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


class CudaRun:
    """A variant on the GPU, over the batches of a run on the CPU."""

    def __init__(self, cpu_run: SmallRun, techniques: dict[str, Any]):
        self.params = on_cuda(cpu_run.params, techniques)
        self.state, self.policy = initial_state(self.params, "v", CUDA)
        apply_recompute(self.state.model, self.params.variants["v"])
        per_micro_batch = self.params.variants["v"].micro_batch_size
        rows = (torch.arange(8) % len(cpu_run.sequences)).reshape(-1, per_micro_batch).numpy()
        self.micro_batches = [moved(cpu_run.sequences.micro_batch(row)) for row in rows]

    def step(self) -> StepOutcome:
        variant = self.params.variants["v"]
        return train_step(self.state, self.micro_batches, variant, self.params.training, self.policy)

    def gradients(self) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}

        def keep(*_: object) -> None:
            for name, parameter in self.state.model.named_parameters():
                assert parameter.grad is not None, name
                seen[name] = parameter.grad.float().cpu()

        hook = self.state.optimizer.register_step_pre_hook(keep)
        self.step()
        hook.remove()
        return to_hugging_face(seen, self.params.model)


@pytest.mark.parametrize("precision", list(TOLERANCE))
@pytest.mark.parametrize("recompute", ["none", "every_block", "selective", "offload"])
@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("sequences", ["packed", "padded"])
def test_gradients_are_those_of_the_cpu(
    tmp_path: Path, precision: str, recompute: str, loss: str, sequences: str
) -> None:
    needed = {"fp8": (8, 9), "tf32": (8, 0), "amp_bf16": (8, 0), "bf16": (8, 0)}.get(precision, (0, 0))
    if torch.cuda.get_device_capability() < needed:
        pytest.skip(f"{precision} needs compute capability {needed}")
    cpu_run = small_run(tmp_path, small_params(sequences=sequences))
    techniques = {"precision": precision, "recompute": recompute, "loss": loss, "loss_chunk_tokens": 24}
    run = CudaRun(cpu_run, techniques | {"micro_batch_size": 4})
    batch = cpu_run.sequences.micro_batch(list(range(8)))
    assert distance(run.gradients(), cpu_run.gradients([batch])) < TOLERANCE[precision]


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_a_step_never_waits_for_the_device(tmp_path: Path, precision: str, loss: str) -> None:
    use_deterministic_kernels(CUDA)
    run = CudaRun(small_run(tmp_path, small_params()), {"precision": precision, "loss": loss})
    run.step()  # what is initialised once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_overflow_skips_the_step_and_the_schedule(tmp_path: Path) -> None:
    run = CudaRun(small_run(tmp_path, small_params()), {"precision": "amp_fp16"})
    run.state.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    before = [parameter.clone() for parameter in run.state.model.parameters()]
    outcome = run.step()
    assert outcome.skipped is not None
    assert bool(outcome.skipped)
    assert all(torch.equal(old, new) for old, new in zip(before, run.state.model.parameters(), strict=True))
    assert run.state.scaler.get_scale() == 2.0**39
    assert int(run.state.schedule.steps_taken) == 0
    assert int(run.state.skipped_steps) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_that_is_reported_is_the_one_that_runs(dtype: torch.dtype, packed: bool) -> None:
    """Grouped heads must never fall to the math kernel, which builds the scores."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 64, heads, 32, generator=generator) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 10, 64, 100, 128], dtype=torch.int32) if packed else None
    expected = causal_attention(q, k, v, cu_seqlens)
    inputs = [tensor.to(CUDA, dtype).requires_grad_() for tensor in (q, k, v)]
    with torch.profiler.profile() as profile:
        out = causal_attention(*inputs, cu_seqlens.to(CUDA) if packed else None)  # type: ignore[union-attr]
        out.sum().backward()
    ran = {event.key for event in profile.key_averages()}
    kernel = attention_kernel(CUDA, dtype)
    assert any(f"_{kernel}_attention_forward" in name for name in ran), ran
    assert not any("attention_math" in name for name in ran)
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    assert (out.float().cpu() - expected).abs().max() < tolerance


def test_each_policy_holds_less_than_the_one_before(tmp_path: Path) -> None:
    wide = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "max_position_embeddings": 256,
    }
    cpu_run = small_run(tmp_path, small_params(model=wide, sequence_length=256, token_budget=20 * 8 * 256))
    peaks = []
    for recompute in ("none", "selective", "every_block"):
        run = CudaRun(cpu_run, {"precision": "amp_bf16", "recompute": recompute, "loss": "chunked"})
        run.micro_batches = [moved(cpu_run.sequences.micro_batch([0] * 8))]
        run.step()
        alive = torch.cuda.memory_allocated(CUDA)
        peaks.append(measure_peak(CUDA, run.step).bytes - alive)
        del run
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.7 * peaks[0]


@pytest.mark.parametrize("sequences", ["packed", "padded"])
@pytest.mark.parametrize("techniques", [{}, {"precision": "amp_bf16"}, {"compile": "blocks"}], ids=str)
def test_the_same_steps_give_the_same_bits(
    tmp_path: Path, techniques: dict[str, Any], sequences: str
) -> None:
    """Attention's backward adds up by atomics unless it is told not to: over blocks of keys, so that only
    documents of many show it."""
    long = {"sequence_length": 1024, "sequences": sequences, "token_budget": 20 * 8 * 1024}
    model = {"hidden_size": 128, "max_position_embeddings": 1024}
    ends = []
    use_deterministic_kernels(CUDA)
    for number in range(2):
        cpu_run = small_run(tmp_path / str(number), small_params(model=model, **long), longest_document=3000)
        run = CudaRun(cpu_run, techniques)
        apply_compile(run.state.model, run.params.variants["v"])
        for _ in range(5):
            run.step()
        ends.append({name: tensor.cpu() for name, tensor in run.state.model.state_dict().items()})
    assert bit_equal(*ends)
