"""The planned micro-batch on a GPU: it fits the budget, and the next larger one does not."""

from typing import Any

import pytest
import torch

from benchmarks.plan_accuracy import VARIANT, Configuration, measured_peak
from stages.memory.fit import Predictions, largest_micro_batch
from stages.memory.machine import machine_of
from stages.params import HardwareParams, Params, VariantParams
from stages.params.section import divisors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
GLOBAL_BATCH_SIZE = 32


def params_with(techniques: dict[str, Any], memory_gib: float) -> Params:
    params = Configuration("wide", {"micro_batch_size": 8} | techniques, 16_000, 512, 8).params
    hardware = HardwareParams(device="cuda", memory_gib=memory_gib, memory_reserve_gib=0)
    training = params.training.model_copy(update={"global_batch_size": GLOBAL_BATCH_SIZE})
    return params.model_copy(update={"hardware": hardware, "training": training})


AMP_CHUNKED = {"precision": "amp_bf16", "loss": "chunked"}


@pytest.mark.parametrize(
    ("techniques", "memory_gib"), [({}, 1.5), ({}, 3.0), (AMP_CHUNKED, 1.0), (AMP_CHUNKED, 1.15)], ids=str
)
def test_the_planned_micro_batch_fits_and_the_next_does_not(
    techniques: dict[str, Any], memory_gib: float
) -> None:
    params = params_with(techniques, memory_gib)
    predictions = Predictions(params, machine_of(params.hardware))
    recipes = [VariantParams(micro_batch_size=n, **techniques) for n in divisors(GLOBAL_BATCH_SIZE)]
    found = largest_micro_batch(predictions, recipes)
    assert found.recipe is not None and found.next_larger is not None, "choose another budget"
    capacity = predictions.machine.capacity_bytes
    assert capacity is not None

    def measured(recipe: VariantParams) -> int:
        """Live tensors of a real step, and beside them what the plan allows for."""
        peak = measured_peak(params.model_copy(update={"variants": {VARIANT: recipe}}), CUDA)
        predicted = predictions.of(recipe)
        return peak + predicted.needed_bytes - predicted.allocated_bytes

    assert measured(found.recipe) <= capacity
    assert measured(found.next_larger) > capacity
