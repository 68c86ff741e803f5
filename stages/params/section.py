"""What every section of `params.yaml` has in common."""

import math
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of parameters; a key it does not know is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields of this section, each broken one as (key, what is wrong).

        They are yielded and not raised, so that one reading of a file reports all of them.
        """
        yield from ()


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def one_of(choices: list[int]) -> str:
    """`[1, 2, 4]` as "1, 2 or 4"."""
    *most, last = [str(choice) for choice in choices]
    return f"{', '.join(most)} or {last}" if most else last
