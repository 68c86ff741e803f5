"""GPUs that a plan can be made for: memory, peak FLOP/s per number format, bandwidth, links to other GPUs.

Peaks are of dense matrix products. Data sheets print twice as much, "with sparsity", which is for weights
of which every second one is zero. On GeForce cards they are those with fp32 accumulation, half of what
products with fp16 accumulation reach: PyTorch accumulates in fp32. Clocks are the boost clocks of the data
sheets; a card at its power limit runs below them.

Memory is what the driver reports (`torch.cuda.get_device_properties().total_memory`, the "total capacity" of
an out-of-memory message): less than the data sheet's GB, since the driver keeps some for itself and ECC takes
its share of GDDR6. It differs by some 0.1 GiB between drivers. Those of rtx_3060_12gb, rtx_5090, l4, l40s,
a100_40gb, a100_80gb, h200 and b200 are from such messages in public reports, the least found; the others are
the data sheet's less the same share. Nothing here was measured by this project.

Multiprocessors (SMs) are the data sheets' CUDA cores divided by those of one SM: 128, of A100 and T4 64.

Links are of one direction; data sheets print both together. Without NVLink in the table, GPUs of one machine
talk over PCIe (a bridge between two cards is not counted). Machines are assumed to have eight GPUs, and to
talk over 100 Gb/s, except those with NVLink, which have a network card for each GPU: 200 Gb/s on DGX A100,
400 Gb/s on DGX H100, H200 and B200 (their data sheets). Rented machines often have less.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stages.params import HardwareParams

Format = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


class TargetError(ValueError):
    """There is no target of this name; the message names the nearest."""


@dataclass(frozen=True)
class Target:
    """One GPU."""

    name: str
    label: str
    memory_bytes: int
    """As the driver reports it."""
    compute_capability: tuple[int, int]
    multiprocessors: int
    peak_flops_per_second: Mapping[Format, float]
    """Dense; a format that is not there has no fast matrix product on this GPU."""
    bytes_per_second: float
    """Of the device's memory."""
    host_bytes_per_second: float
    """To and from host memory over PCIe, in one direction."""
    link_bytes_per_second: float
    """To another GPU of the machine, in one direction."""
    network_bytes_per_second: float
    """Of a whole machine to others, in one direction."""


def _gpu(
    name: str,
    label: str,
    memory_gib: float,
    capability: tuple[int, int],
    multiprocessors: int,
    gb_per_second: float,
    pcie: float = 32,
    nvlink: float | None = None,
    network: float = 12.5,
    **teraflops: float,
) -> Target:
    peaks = {kind: teraflops[kind] * 1e12 for kind in _FORMATS if kind in teraflops}
    return Target(
        name,
        label,
        int(memory_gib * 2**30),
        capability,
        multiprocessors,
        peaks,
        gb_per_second * 1e9,
        pcie * 1e9,
        (nvlink or pcie) * 1e9,
        network * 1e9,
    )


_FORMATS: tuple[Format, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8")

_GPUS = [
    # PCIe is 4.0 x16, 32 GB/s, where nothing else is said.
    # NVIDIA Ampere GA102 white paper, appendix: on GeForce tf32 = fp32 and 16 bits = 2 x fp32 (29.8 and 59.5
    # on the RTX 3080); fp32 = 2 x cores x boost clock. RTX 3060: 3584 cores, 1.777 GHz.
    _gpu(
        "rtx_3060_12gb", "RTX 3060 12 GB", 11.62, (8, 6), 28, 360,
        fp32=12.7, tf32=12.7, bf16=25.5, fp16=25.5,
    ),
    _gpu("rtx_3090", "RTX 3090", 23.56, (8, 6), 82, 936, fp32=35.6, tf32=35.6, bf16=71.0, fp16=71.0),
    # NVIDIA Ada white paper, appendix: tf32 = fp32, 16 bits = 2 x, fp8 = 4 x (RTX 4090: 82.6, 165.2, 330.3).
    # RTX 4070: 5888 cores, 2.475 GHz. RTX 4060 Ti: 4352 cores, 2.535 GHz, 8 lanes of PCIe.
    _gpu(
        "rtx_4070", "RTX 4070", 11.59, (8, 9), 46, 504,
        fp32=29.1, tf32=29.1, bf16=58.3, fp16=58.3, fp8=116.6,
    ),
    _gpu(
        "rtx_4060_ti_16gb", "RTX 4060 Ti 16 GB", 15.56, (8, 9), 34, 288, pcie=16,
        fp32=22.1, tf32=22.1, bf16=44.1, fp16=44.1, fp8=88.2,
    ),
    _gpu(
        "rtx_4090", "RTX 4090", 23.51, (8, 9), 128, 1008,
        fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3,
    ),
    # NVIDIA RTX Blackwell (GB202) white paper, appendix; PCIe 5.0.
    _gpu(
        "rtx_5090", "RTX 5090", 31.34, (12, 0), 170, 1792, pcie=64,
        fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419.0,
    ),
    # RTX A6000 data sheet: 309.7 TFLOP/s with sparsity, tf32 half of 16 bits. ECC is on by default.
    _gpu("rtx_a6000", "RTX A6000", 47.40, (8, 6), 84, 768, fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8),
    # T4 data sheet; Turing has no bf16 and no tf32, and PCIe 3.0.
    _gpu("t4", "T4", 14.56, (7, 5), 40, 320, pcie=16, fp32=8.1, fp16=65.0),
    # L4 and L40S data sheets; tensor-core figures are printed with sparsity and halved here.
    _gpu("l4", "L4", 22.03, (8, 9), 58, 300, fp32=30.3, tf32=60.0, bf16=121.0, fp16=121.0, fp8=242.5),
    _gpu("l40s", "L40S", 44.39, (8, 9), 142, 864, fp32=91.6, tf32=183.0, bf16=362.0, fp16=362.0, fp8=733.0),
    # A10G data sheet: 70 TFLOP/s dense in 16 bits (an A10 has 125).
    _gpu("a10g", "A10G", 21.98, (8, 6), 80, 600, fp32=31.5, tf32=35.0, bf16=70.0, fp16=70.0),
    # A100 data sheet, SXM4 (HBM2 1555 GB/s, HBM2e 2039 GB/s; the PCIe card of 80 GB has 1935); NVLink 3.
    _gpu(
        "a100_40gb", "A100 40 GB", 39.38, (8, 0), 108, 1555, nvlink=300, network=200,
        fp32=19.5, tf32=156.0, bf16=312.0, fp16=312.0,
    ),
    _gpu(
        "a100_80gb", "A100 80 GB", 79.14, (8, 0), 108, 2039, nvlink=300, network=200,
        fp32=19.5, tf32=156.0, bf16=312.0, fp16=312.0,
    ),
    # H100 and H200 data sheets, SXM5; tensor-core figures are printed with sparsity and halved here;
    # NVLink 4, PCIe 5.0.
    _gpu(
        "h100_80gb", "H100 80 GB", 79.10, (9, 0), 132, 3350, pcie=64, nvlink=450, network=400,
        fp32=67.0, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9,
    ),
    _gpu(
        "h200", "H200", 139.72, (9, 0), 132, 4800, pcie=64, nvlink=450, network=400,
        fp32=67.0, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9,
    ),
    # HGX B200 data sheet, per GPU (1/8 of the board), dense; NVLink 5, PCIe 5.0.
    _gpu(
        "b200", "B200", 178.35, (10, 0), 148, 8000, pcie=64, nvlink=900, network=400,
        fp32=75.0, tf32=1100.0, bf16=2250.0, fp16=2250.0, fp8=4500.0,
    ),
]  # fmt: skip

TARGETS: dict[str, Target] = {gpu.name: gpu for gpu in _GPUS}
"""By name; `cpu`, which is a target too, has no figures of its own."""


def find_target(name: str) -> Target:
    """Raises TargetError, naming the nearest or all, where there is no GPU of this name."""
    if name in TARGETS:
        return TARGETS[name]
    close = difflib.get_close_matches(name.lower(), TARGETS, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(TARGETS)}"
    raise TargetError(f"target {name}: no such GPU; {hint}")


def target_of(hardware: HardwareParams) -> Target | None:
    """The GPU that the params plan for; None for cpu and for a plain amount of memory."""
    return None if hardware.target in (None, "cpu") else TARGETS[hardware.target or ""]
