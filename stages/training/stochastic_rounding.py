"""Rounding fp32 to bfloat16 up or down at random, so that the mean is exact.

bfloat16 has 8 significant bits: below 1.0 comes 0.9961. An update of 1e-4 is less than half that gap, so
rounding to the nearest gives 1.0 again, after any number of steps. Rounded stochastically it moves one
step in 39 by the whole gap, and on average by 1e-4 (Gupta et al. 2015, "Deep Learning with Limited
Numerical Precision"; Zamirai et al. 2020, "Revisiting BFloat16 Training").
"""

import torch
from torch import Tensor

_DROPPED_BITS = 16
"""fp32 and bfloat16 share sign and exponent; bfloat16 keeps the upper 7 of 23 bits of the mantissa."""


def stochastic_round(values: Tensor) -> Tensor:
    """fp32 to bfloat16, unbiased: the neighbour above is taken as often as the value is near to it.

    A random number below 2^16 is added to the bit pattern and the 16 low bits are cut off: the carry
    happens with the probability low bits / 2^16. Infinities and NaN stay what they are.

    Args:
        values: fp32, any shape.

    The random bits come from torch's default generator of the device, which checkpoints hold.
    """
    noise = torch.randint_like(values, 1 << _DROPPED_BITS, dtype=torch.int32)
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-1 << _DROPPED_BITS)
    # A NaN whose bits are all low ones would be cut to infinity.
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)
