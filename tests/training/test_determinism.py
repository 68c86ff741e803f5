"""What is switched on for a GPU; that its kernels then repeat their bits is shown on one (test_on_gpu.py)."""

import os
import subprocess
import sys

import pytest
import torch

from stages.measure.hardware import HardwareError
from stages.training.determinism import use_deterministic_kernels

SWITCHED = """
import os, torch
from stages.training.determinism import use_deterministic_kernels
use_deterministic_kernels(torch.device("cuda"))
print(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
      torch.utils.deterministic.fill_uninitialized_memory, os.environ["CUBLAS_WORKSPACE_CONFIG"])
"""


def test_a_gpu_gets_deterministic_kernels() -> None:
    # Tests have the variable (conftest.py); here it must come from the stage.
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-c", SWITCHED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    # Only warning, attention would go on adding up in any order.
    assert done.stdout.split() == ["True", "False", "False", ":4096:8"]


def test_a_users_workspace_stays() -> None:
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    command = [sys.executable, "-c", SWITCHED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == ":16:8"


def test_a_workspace_with_which_products_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:2")
    with pytest.raises(
        HardwareError, match=r"CUBLAS_WORKSPACE_CONFIG is :1024:2.*unset it, or set :4096:8 or :16:8"
    ):
        use_deterministic_kernels(torch.device("cuda"))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_cpu_needs_nothing() -> None:
    use_deterministic_kernels(torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()
