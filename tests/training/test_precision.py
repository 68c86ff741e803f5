"""Precision policies, what they refuse, and how fp32 matrix products are computed."""

from collections.abc import Iterator

import pytest
import torch

from stages.params import VariantParams
from stages.training import precision
from stages.training.precision import PrecisionError, precision_policy, set_float32_matmul

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def restored_setting() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def variant(name: str) -> VariantParams:
    return VariantParams(micro_batch_size=1, precision=name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "product", "scaled"),
    [
        ("fp32", torch.float32, False),
        ("amp_bf16", torch.bfloat16, False),
        ("amp_fp16", torch.float16, True),
    ],
)
def test_what_is_computed_in_what(name: str, product: torch.dtype, scaled: bool) -> None:
    policy = precision_policy(variant(name), CPU)
    weight = torch.ones(4, 4)
    with policy.autocast():
        assert (weight @ weight).dtype is product
    assert (weight @ weight).dtype is torch.float32
    assert policy.make_scaler().is_enabled() is scaled
    assert float(policy.make_scaler().scale(torch.ones(()))) == (65536 if scaled else 1)


def test_tf32_is_refused_on_a_cpu() -> None:
    with pytest.raises(PrecisionError, match=r"tf32 .* training runs on cpu; use fp32 or amp_bf16"):
        precision_policy(variant("tf32"), CPU)


@pytest.mark.parametrize("name", ["tf32", "amp_bf16"])
def test_a_gpu_that_is_too_old_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(PrecisionError, match=r"needs compute capability 8\.0 .*Tesla T4 has 7\.5"):
        precision_policy(variant(name), CUDA)
    for possible in ("fp32", "amp_fp16"):
        assert precision_policy(variant(possible), CUDA).name == possible


@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
def test_fp32_products_on_a_cpu_keep_their_24_bits(name: str, restored_setting: None) -> None:
    assert set_float32_matmul(name, CPU) == torch.get_float32_matmul_precision()
    generator = torch.Generator().manual_seed(1)
    for rows, inner, columns in ((300, 300, 300), (16, 1024, 64), (1, 512, 512), (2048, 32, 260)):
        a, b = torch.randn(rows, inner, generator=generator), torch.randn(inner, columns, generator=generator)
        exact = a.double() @ b.double()
        # bfloat16 has 8 bits: it would be off by more than 1e-3.
        assert float((a @ b - exact).abs().max() / exact.abs().max()) < 2e-6


def test_a_setting_that_rounds_to_bfloat16_is_not_kept(
    restored_setting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU with AMX, which is not at hand: only its verdict is put in."""
    monkeypatch.setattr(precision, "_rounds_like_fp32", lambda: False)
    assert set_float32_matmul("fp32", CPU) == "highest"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("name", "expected"), [("tf32", "high"), ("fp32", "highest"), ("amp_bf16", "highest")]
)
def test_only_tf32_computes_in_tf32(name: str, expected: str, restored_setting: None) -> None:
    assert set_float32_matmul(name, CUDA) == expected == torch.get_float32_matmul_precision()
