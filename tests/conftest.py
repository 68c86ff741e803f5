"""Before anything imports torch: OpenMP's threads wait asleep, here and in what the tests start.

By default they spin at every barrier. On a machine that does other work beside, that made tests of tiny
tensors a hundred times slower.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Read once, at the first product on a GPU; without it those that ask for deterministic ones are refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from hypothesis import HealthCheck, settings

# A slow machine is no failure; the same examples every time, so that a red run is red again.
settings.register_profile(
    "frugal", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("frugal")
