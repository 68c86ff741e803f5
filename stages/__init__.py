"""Frugal's pipeline: one module per DVC stage, and the rooms they are built from."""

import os

# OpenMP's threads spin while they wait. Where anything else wants the same cores a small matrix product
# then takes 100 times as long, and a compiled step 10 times. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
