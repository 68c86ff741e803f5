"""Frugal's pipeline: one module per DVC stage, and the rooms they are built from."""

import os
import signal
import sys

# `python -m stages.train` is importing torch for seconds before it can say anything: Ctrl-C in them ends it
# without a traceback. The stage's own handlers come later (stages/interruption.py).
if sys.argv[:1] == ["-m"]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# OpenMP's threads spin while they wait. Where anything else wants the same cores a small matrix product
# then takes 100 times as long, and a compiled step 10 times. Asleep at once they cost a fifth of the speed
# where nothing else does. So they spin for some microseconds. Read when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
