import subprocess
import sys

import pytest

# Page faults of 20 rounds of a 40 MiB tensor: at least 20 huge pages or 10,240 small ones each when every
# round's memory is new, next to none when the first round's is used again.
_ROUNDS = """
import resource, sys, torch
from stages.measure.host_allocator import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
for _ in range(20):
    torch.ones(10 * 2**20)
before = faults()
for _ in range(20):
    torch.ones(10 * 2**20)
print(kept, faults() - before)
"""


def page_faults(how: str) -> tuple[str, int]:
    ran = subprocess.run([sys.executable, "-c", _ROUNDS, how], capture_output=True, text=True, check=True)
    kept, faults = ran.stdout.split()
    return kept, int(faults)


def test_memory_that_was_freed_is_used_again() -> None:
    kept, faults = page_faults("keep")
    if kept == "False":
        pytest.skip("the C library is not glibc")
    _, faults_without = page_faults("leave")
    assert 10 * faults < faults_without
