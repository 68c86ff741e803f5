"""What this device can really do with a number format, found by trying.

Whether an operation exists for a type depends on the device, its generation and the build of torch,
and an operation that exists may still compute something else (tf32 switched on where there is none)
or very slowly (fp16 on most CPUs). So each one is run, its result is checked, and it is timed.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from stages.measure.hardware import MatmulCeiling, measure_matmul_flops_per_second
from stages.measure.number_formats import E8M0, FP4_E2M1, FP8_E4M3, FP8_E5M2, TF32, NumberFormat
from stages.params.variant import Precision

YES = "yes"
_YES_TIMES_E4M3 = f"{YES}, times e4m3"
_REASON_LENGTH = 160
# Also the least size that a matrix of MX blocks can have: its scales come in tiles of 128 x 4.
_CHECKED_SIZE = 128
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PRECISION_OF: dict[str, Precision] = {"fp32": "fp32", "tf32": "tf32", "bf16": "amp_bf16", "fp16": "amp_fp16"}


@dataclass(frozen=True)
class FormatSupport:
    """Each operation: a text that starts with "yes", or the short reason why not, the library's own
    where it gave one."""

    create: str
    from_fp32: str
    to_fp32: str
    add: str
    matmul: str
    autocast: str
    """fp32 operands are cast to the format by `torch.autocast` and multiplied."""
    scaled_matmul: str
    """`torch._scaled_mm`; e8m0 takes part as the block scale of e4m3 operands, never as an operand."""
    matmul_relative_error: float | None = None
    """Norm of the difference to the fp64 product of the same operands over the norm of that product."""
    scaled_matmul_relative_error: float | None = None
    matmul_speed: MatmulCeiling | None = None
    scaled_matmul_speed: MatmulCeiling | None = None

    @classmethod
    def refused(cls, reason: str) -> "FormatSupport":
        """Nothing works, all for the same reason."""
        return cls(reason, reason, reason, reason, reason, reason, reason)


class _WrongResult(Exception):
    """The operation ran, but what came out is not its result."""


def try_format(number_format: NumberFormat, device: torch.device) -> FormatSupport:
    """Try every operation on small tensors and check what comes out. Measures no time."""
    if number_format == TF32:
        return _try_tf32(device)
    dtype = number_format.dtype
    if dtype is None:
        reason = f"torch {torch.__version__.split('+')[0]} has no type for {number_format.name}"
        return FormatSupport.refused(reason)
    errors: dict[str, float] = {}

    def create() -> None:
        if torch.zeros(4, dtype=dtype, device=device).dtype != dtype:
            raise _WrongResult("the tensor has another type")

    def from_fp32() -> None:
        there_and_back = torch.tensor([1.0, 2.0], device=device).to(dtype).to(torch.float32)
        if there_and_back.tolist() != [1.0, 2.0]:
            raise _WrongResult(f"1 and 2 became {there_and_back.tolist()}")

    def to_fp32() -> None:
        tensor = torch.zeros(4, dtype=dtype, device=device).to(torch.float32)
        # e8m0 has no zero: it makes its smallest number of it.
        if tensor.dtype != torch.float32 or tensor.abs().max().item() > 1e-30:
            raise _WrongResult("0 did not stay 0")

    def add() -> None:
        total = torch.ones(4, dtype=dtype, device=device) + torch.ones(4, dtype=dtype, device=device)
        if total.to(torch.float32).tolist() != [2.0] * 4:
            raise _WrongResult(f"1 + 1 gave {total[0].item()}")

    def matmul() -> None:
        errors["matmul"] = _checked_error(_plain_product(dtype, device, _CHECKED_SIZE), number_format)

    def scaled_matmul() -> None:
        product = _scaled_product(number_format, device, _CHECKED_SIZE)
        errors["scaled_matmul"] = _checked_error(product, number_format)

    def scaled_matmul_with_e4m3() -> None:
        product = _scaled_product(number_format, device, _CHECKED_SIZE, right=FP8_E4M3)
        errors["scaled_matmul"] = _checked_error(product, number_format)

    def autocast() -> None:
        start = torch.bfloat16 if dtype == torch.float32 else torch.float32
        ones = torch.ones(16, 16, dtype=start, device=device)
        with warnings.catch_warnings():
            # On a CPU an unknown type is a warning, and the region then runs without autocast.
            warnings.simplefilter("error", UserWarning)
            with torch.autocast(device.type, dtype=dtype):
                product = ones @ ones
        if product.dtype != dtype:
            raise _WrongResult(f"accepted, but the product came out as {product.dtype}")
        product.cpu()

    scaled = _attempt(scaled_matmul)
    if scaled == YES:
        scaled += {E8M0: ", as the scale of e4m3 blocks", FP4_E2M1: ", with e4m3 block scales"}.get(
            number_format, ""
        )
    elif number_format == FP8_E5M2 and _attempt(scaled_matmul_with_e4m3) == YES:
        # The pair of a backward pass: e5m2 gradients times e4m3 weights or activations.
        scaled = _YES_TIMES_E4M3
    # Arguments are evaluated in order, so the errors are known when they are read.
    return FormatSupport(
        create=_attempt(create),
        from_fp32=_attempt(from_fp32),
        to_fp32=_attempt(to_fp32),
        add=_attempt(add),
        matmul=_attempt(matmul),
        autocast=_attempt(autocast),
        scaled_matmul=scaled,
        matmul_relative_error=errors.get("matmul"),
        scaled_matmul_relative_error=errors.get("scaled_matmul"),
    )


def measure_speed(
    number_format: NumberFormat, support: FormatSupport, device: torch.device, budget_seconds: float = 0.3
) -> FormatSupport:
    """`support` with the speed of each product that works.

    The matrices grow while a larger product fits the budget, so a type that a device only emulates
    costs no more time than a fast one. The formats that training multiplies in are measured as the
    ceiling of its MFU is.
    """
    dtype = number_format.dtype
    plain = scaled = None
    if support.matmul.startswith(YES):
        if number_format.name in _PRECISION_OF:
            precision = _PRECISION_OF[number_format.name]
            plain = measure_matmul_flops_per_second(device, precision, budget_seconds)
        elif dtype is not None:
            plain = _speed(
                lambda size: _plain_product(dtype, device, size),
                device, budget_seconds, f"{number_format.name} matmul",
            )  # fmt: skip
    if support.scaled_matmul.startswith(YES):
        right = FP8_E4M3 if support.scaled_matmul == _YES_TIMES_E4M3 else None
        scaled = _speed(
            lambda size: _scaled_product(number_format, device, size, right),
            device, budget_seconds, f"{number_format.name} scaled matmul",
        )  # fmt: skip
    return replace(support, matmul_speed=plain, scaled_matmul_speed=scaled)


@dataclass(frozen=True)
class _Product:
    multiply: Callable[[], Tensor]
    operands: Callable[[], tuple[Tensor, Tensor]]
    """The numbers that the operands hold, fp64 on the CPU: [size, size] and [size, size]."""


def _plain_product(dtype: torch.dtype, device: torch.device, size: int) -> _Product:
    left, right = _random(size, device).to(dtype), _random(size, device).to(dtype)
    return _Product(lambda: left @ right, lambda: (_in_fp64(left), _in_fp64(right)))


def _scaled_product(
    number_format: NumberFormat, device: torch.device, size: int, right: NumberFormat | None = None
) -> _Product:
    """The product with scales of 1. The right operand is column-major, which cuBLASLt asks for."""
    if number_format == FP4_E2M1:
        # Two numbers a byte, and an e4m3 scale for every 16 numbers of a row (NVFP4). All scales are
        # equal, so the order in which the kernel wants them does not matter.
        codes = [torch.randint(0, 256, (size, size // 2), dtype=torch.uint8, device=device) for _ in "ab"]
        a, b = (code.view(torch.float4_e2m1fn_x2) for code in codes)
        scale = torch.ones(size * size // 16, device=device).to(torch.float8_e4m3fn)
        return _Product(
            lambda: _scaled_mm(a, b, scale), lambda: (_fp4_values(codes[0]), _fp4_values(codes[1]).t())
        )
    operand, other = number_format.dtype, (right or number_format).dtype
    scale = torch.tensor(1.0, device=device)
    if number_format == E8M0:
        # The scale of every 32 numbers of a row (MXFP8).
        operand = other = torch.float8_e4m3fn
        scale = torch.ones(size * size // 32, device=device).to(torch.float8_e8m0fnu)
    a, b = _random(size, device).to(operand), _random(size, device).to(other)
    return _Product(lambda: _scaled_mm(a, b, scale), lambda: (_in_fp64(a), _in_fp64(b).t()))


def _scaled_mm(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def _try_tf32(device: torch.device) -> FormatSupport:
    """tf32 is no type but a way to multiply fp32 matrices, so only the product can be tried."""
    no_type = "no type of its own: fp32 tensors, rounded inside a matrix product"
    if device.type != "cuda":
        return replace(FormatSupport.refused(no_type), matmul="a mode of CUDA's matrix products")
    errors: list[float] = []

    def matmul() -> None:
        errors.append(_checked_error(_plain_product(torch.float32, device, _CHECKED_SIZE), TF32))
        # fp32 is off by some 1e-7, tf32 by some 1e-4.
        if errors[0] < 1e-5:
            raise _WrongResult("accepted, but the product was computed in fp32")

    matmul_verdict = _attempt(matmul)
    return replace(
        FormatSupport.refused(no_type),
        matmul=matmul_verdict,
        matmul_relative_error=errors[0] if errors and matmul_verdict == YES else None,
    )


def _checked_error(product: _Product, number_format: NumberFormat) -> float:
    """Relative error of the product against fp64.

    Raises:
        _WrongResult: the error is more than rounding to the format can explain.
    """
    with _float32_matmul_precision("high" if number_format == TF32 else "highest"):
        result = _in_fp64(product.multiply())
    left, right = product.operands()
    exact = left @ right
    error = ((result - exact).norm() / exact.norm()).item()
    # A scaled product comes out in bf16 whatever its operands are, which this bound allows too:
    # its operands have no more than 3 mantissa bits.
    if not error < min(8 * float(number_format.eps), 0.5):
        raise _WrongResult(f"ran, but the product is off by {error:.1%}")
    return error


def _speed(
    product_of: Callable[[int], _Product], device: torch.device, budget_seconds: float, label: str
) -> MatmulCeiling:
    largest = 8192 if device.type == "cuda" else 2048
    size = _CHECKED_SIZE
    multiply = product_of(size).multiply
    _seconds_of(multiply, device)  # starts threads, loads libraries
    # Twice the size is eight times the work.
    while size < largest and 8 * _seconds_of(multiply, device) < budget_seconds / 4:
        size *= 2
        multiply = product_of(size).multiply
        _seconds_of(multiply, device)
    median = statistics.median(_seconds_of(multiply, device) for _ in range(5))
    return MatmulCeiling(2 * size**3 / median, f"measured {size}x{size}x{size} {label}")


def _seconds_of(multiply: Callable[[], Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    multiply()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _attempt(operation: Callable[[], object]) -> str:
    """ "yes", or why not in one line. Any exception is an answer here: torch raises at least five kinds."""
    try:
        operation()
    except Exception as error:
        # Behind this line torch prints a C++ call stack.
        reason = " ".join(str(error).split("Exception raised from")[0].split())
        if len(reason) > _REASON_LENGTH:
            sentences = reason[:_REASON_LENGTH].rpartition(". ")[0]
            reason = f"{sentences}." if sentences else f"{reason[: _REASON_LENGTH - 1]}…"
        return reason or type(error).__name__
    return YES


@contextmanager
def _float32_matmul_precision(precision: Literal["highest", "high"]) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _random(size: int, device: torch.device) -> Tensor:
    """Standard normal fp32 [size, size], from a generator of its own."""
    generator = torch.Generator(device).manual_seed(size)
    return torch.randn(size, size, device=device, generator=generator)


def _in_fp64(tensor: Tensor) -> Tensor:
    return tensor.cpu().to(torch.float64)


def _fp4_values(codes: Tensor) -> Tensor:
    """Bytes [rows, columns] of two e2m1 numbers each, low half first, as fp64 [rows, 2 columns]."""
    table = torch.tensor([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)], dtype=torch.float64)
    codes = codes.cpu().to(torch.int64)
    return torch.stack([table[codes % 16], table[codes // 16]], dim=-1).flatten(1)
