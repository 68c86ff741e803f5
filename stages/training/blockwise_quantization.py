"""Eight-bit codes for an optimizer's moments, with one scale per block.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization": values are divided by the largest
magnitude among their 256 neighbours and replaced by the nearest entry of a fixed table, whose spacing
follows the magnitude over seven decades. One outlier spoils its own block and no other.

Two things differ from the paper, both to be safe:

- A block lies within one row. So codes and scales are cut along the rows like the weight itself, and a
  word of the embedding that was seen often does not coarsen a rare one.
- The table of the second moment has no zero, and the signed one is symmetric and holds 1 and -1. A second
  moment rounded to 0 beside a first moment that is not would make the update m / epsilon: the zero-point
  problem (Li et al. 2023, "Memory Efficient Optimizers with 4-bit States").
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
"""Values that share a scale; a shorter row is one block."""


def quantize(values_RC: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Nearest codes of `values_RC` (fp32).

    Args:
        values_RC: rows x columns.
        signed: False: all values are >= 0.

    Returns:
        codes [R, C] (uint8) and scales [R, blocks] (fp32), the largest magnitude of each block. A block
        with a NaN or an infinity comes back as NaN.
    """
    blocks_RNW = _in_blocks(values_RC)
    scales_RN = blocks_RNW.abs().amax(-1)
    # The smallest normal number instead of 0: a block of zeros has scale 0, which makes any code 0.
    tiny = torch.finfo(torch.float32).tiny
    relative = blocks_RNW / scales_RN.clamp_min(tiny).unsqueeze(-1)
    codes = _nearest_codes(relative, signed).to(torch.uint8)
    return codes.flatten(1)[:, : values_RC.shape[1]], scales_RN


def dequantize(codes_RC: Tensor, scales_RN: Tensor, signed: bool) -> Tensor:
    """The values (fp32) that the codes stand for."""
    values = _table(signed, codes_RC.device).index_select(0, codes_RC.flatten().int())
    blocks_RNW = _in_blocks(values.view(codes_RC.shape))
    return (blocks_RNW * scales_RN.unsqueeze(-1)).flatten(1)[:, : codes_RC.shape[1]]


def block_count(columns: int) -> int:
    """Scales of one row."""
    return -(-columns // BLOCK)


def dynamic_table(signed: bool) -> Tensor:
    """The 255 values that codes stand for at scale 1, ascending (fp32).

    Decade k of seven, [10^-(k+1), 10^-k], is cut into equal parts, half as many in each lower one, and
    the middle of each part is a value: the sign, the exponent and the fraction share the eight bits.
    """
    magnitudes: list[float] = []
    for decade in range(7):
        parts = 2 ** (decade + (0 if signed else 1))
        width = 0.9 / parts
        magnitudes += [10.0 ** (decade - 6) * (0.1 + width * (part + 0.5)) for part in range(parts)]
    if signed:
        magnitudes[-1] = 1.0  # a scale is the magnitude of one of its values, which must come back whole
        return torch.tensor([-m for m in reversed(magnitudes)] + [0.0] + magnitudes)
    return torch.tensor([*magnitudes, 1.0])


@cache
def _table(signed: bool, device: torch.device) -> Tensor:
    return dynamic_table(signed).to(device)


@cache
def _search_tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """For magnitudes: the boundaries half-way between the table's entries, and where to start looking.

    A cell is the 2^16 fp32 numbers that share their upper 16 bits. No cell holds two boundaries.

    Returns:
        boundaries [entries] (fp32), the last one infinity, and the entry nearest to the smallest number
        of each cell [2^15] (int32).
    """
    table = dynamic_table(signed)
    magnitudes = table[table >= 0]
    boundaries = torch.cat([(magnitudes[1:] + magnitudes[:-1]) / 2, torch.tensor([torch.inf])])
    smallest = (torch.arange(2**15, dtype=torch.int32) << 16).view(torch.float32).nan_to_num()
    return boundaries.to(device), torch.bucketize(smallest, boundaries, out_int32=True).to(device)


def _nearest_codes(relative: Tensor, signed: bool) -> Tensor:
    """Codes (int32) of values between -1 and 1: two look-ups, where a binary search takes 20 times longer."""
    boundaries, first_guess = _search_tables(signed, relative.device)
    magnitude = relative.abs().flatten()
    entry = first_guess.index_select(0, magnitude.view(torch.int32) >> 16)
    entry += magnitude > boundaries.index_select(0, entry)
    entry = entry.view(relative.shape)
    return torch.where(relative < 0, -entry, entry).add_(127) if signed else entry


def _in_blocks(values_RC: Tensor) -> Tensor:
    """[R, C] as [R, blocks, width], the last block filled up with zeros."""
    R, C = values_RC.shape
    width = min(BLOCK, C)
    missing = -C % width
    return (F.pad(values_RC, (0, missing)) if missing else values_RC).reshape(R, -1, width)
