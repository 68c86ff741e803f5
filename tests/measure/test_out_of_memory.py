"""Which errors are an allocation that failed; the CPU's is provoked for real, under a limit."""

import subprocess
import sys

import pytest
import torch

from stages.measure.out_of_memory import failed_allocation

CPU = torch.device("cpu")

UNDER_A_LIMIT = """
import resource, torch
from stages.measure.out_of_memory import failed_allocation
kept = torch.ones(3 * 2**20, dtype=torch.uint8)
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
try:
    torch.empty(2**36, dtype=torch.uint8)
except RuntimeError as error:
    failure = failed_allocation(error, torch.device("cpu"))
    print(failure.requested_bytes, failure.in_use_bytes)
"""


def test_the_cpus_allocator_says_what_it_was_asked() -> None:
    done = subprocess.run([sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True, check=True)
    requested, in_use = map(int, done.stdout.split())
    assert requested == 2**36
    assert in_use == 3 * 2**20


@pytest.mark.parametrize(
    ("message", "requested"),
    [
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 12 GiB", 3 * 2**29),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20 * 2**20),
        ("an allocator with other words", None),
    ],
)
def test_cudas_words(message: str, requested: int | None) -> None:
    failure = failed_allocation(torch.OutOfMemoryError(message), CPU)
    assert failure is not None and failure.requested_bytes == requested


def test_other_errors_are_not_taken_for_it() -> None:
    assert failed_allocation(RuntimeError("shapes cannot be multiplied"), CPU) is None
    assert failed_allocation(ValueError("out of memory"), CPU) is None
    assert failed_allocation(MemoryError(), CPU) is not None
