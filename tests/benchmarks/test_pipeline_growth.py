"""Exponents of growth, and the memory of a process and its children."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.pipeline_growth import Curve
from benchmarks.pipeline_process import ProcessError, Spread, run


@pytest.mark.parametrize("power", [0, 0.5, 1, 2])
def test_the_exponent_of_a_power(power: float) -> None:
    curve = Curve("cost", "s", {size: [7 * size**power] for size in (1e6, 2e6, 4e6, 8e6)})
    assert curve.slope() == pytest.approx(power, abs=1e-12)
    assert curve.last_slope() == pytest.approx(power, abs=1e-12)


def test_a_fixed_part_weighs_less_at_the_end() -> None:
    curve = Curve("cost", "s", {size: [10 + size] for size in (1, 2, 4, 80, 160)})
    assert curve.slope() < 0.7
    assert curve.last_slope() == pytest.approx(0.917, abs=0.001)


def test_the_lowest_run_of_each_size_counts() -> None:
    curve = Curve("cost", "s", {2: [9, 4, 5], 1: [2, 3]})
    assert curve.lowest() == [(1, 2), (2, 4)]


def test_a_spread_says_its_ends_only_where_they_differ() -> None:
    assert Spread.of([2.0]).text() == "2.00"
    assert Spread.of([3.0, 1.0, 2.0]).text("{:.0f}") == "2 [1 to 3]"


def test_memory_is_that_of_the_process_and_its_children(tmp_path: Path) -> None:
    # Parent and child hold 40 MB each; either alone would be half.
    hold = "import time; held = b'x' * 40_000_000; time.sleep(0.6)"
    both = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {hold!r}]); {hold}; p.wait()"
    done = run((sys.executable, "-c", both), tmp_path, os.environ, watch_memory=True)
    assert done.peak_bytes is not None
    assert 80e6 < done.peak_bytes < 140e6


def test_a_failure_shows_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match=r"(?s)status 3.*the reason"):
        run((sys.executable, "-c", "print('the reason'); raise SystemExit(3)"), tmp_path, os.environ)
