"""How a cost grows: its slope between logarithms of size and of cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """One cost over sizes."""

    name: str
    unit: str
    cost_by_size: Mapping[float, Sequence[float]]
    """Every run's cost, by what the size really was (bytes, parameters, tokens)."""
    is_flat: bool = False
    """It should not grow at all; else it may grow as the size does."""

    def lowest(self) -> list[tuple[float, float]]:
        """(size, cost) in order, of each size's best run: what others on the machine took is in the rest."""
        return sorted((size, min(costs)) for size, costs in self.cost_by_size.items())

    def slope(self) -> float:
        """The exponent p of cost ~ size^p by least squares; 1 is linear, 0 is constant."""
        points = [(math.log(size), math.log(cost)) for size, cost in self.lowest()]
        mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread

    def last_slope(self) -> float:
        """The exponent between the two largest sizes, where a fixed part weighs least."""
        (size, cost), (larger, more) = self.lowest()[-2:]
        return math.log(more / cost) / math.log(larger / size)
