"""Memory over one step: read from the plan's file, drawn with the peak it has."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from stages.report.memory_timeline import (
    KINDS,
    draw_memory_timeline,
    plot_timeline,
    read_memory_timeline,
)
from stages.report.rows import Comparison
from stages.report.style import DARK, LIGHT


@pytest.fixture
def text(comparison: Comparison) -> str:
    return Path("results/plan/frugal.timeline.csv").read_text()


def test_reads_what_the_plan_writes(text: str) -> None:
    timeline = read_memory_timeline(text)
    assert tuple(timeline.live_bytes) == tuple(KINDS)
    assert len(timeline.events) == len(timeline.phases) == len(timeline.total) == 11
    assert timeline.phases[timeline.peak] == "head and loss, backward"
    assert timeline.total[timeline.peak] == max(timeline.total)


@pytest.mark.parametrize(
    "broken", ["", "event,phase\n", "event,phase\n1,forward\n", "event,phase,x\na,b,c\n"]
)
def test_a_broken_file_is_a_value_error(broken: str) -> None:
    with pytest.raises(ValueError):
        read_memory_timeline(broken)


def test_the_peak_and_the_stretches_are_named(text: str) -> None:
    timeline = read_memory_timeline(text)
    axes = Figure().add_subplot()
    plot_timeline(axes, timeline, LIGHT)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["forward", "backward", "optimizer"]
    assert axes.texts[0].get_text() == "74.0 MiB"
    assert axes.get_ylabel() == "MiB"


def test_a_limit_is_drawn_where_it_is_near(text: str) -> None:
    timeline = read_memory_timeline(text)
    lines = []
    for share in (0.8, 1.2, 20):
        axes = Figure().add_subplot()
        plot_timeline(axes, timeline, LIGHT, limit_bytes=int(share * timeline.total.max()))
        lines.append(len([label for label in axes.texts if "fits up to here" in label.get_text()]))
        assert axes.get_ylim()[1] >= timeline.total.max()
    assert lines == [1, 1, 0]


def test_the_drawing_holds_all_that_it_is_given(text: str) -> None:
    timeline = read_memory_timeline(text)
    plain = draw_memory_timeline("frugal", timeline, {}, None)
    assert plain.startswith(b"\x89PNG")
    assert draw_memory_timeline("frugal", timeline, {}, None) == plain
    others = [
        draw_memory_timeline("other", timeline, {}, None),
        draw_memory_timeline("frugal", timeline, {"CUDA context and kernels": 2**29}, None),
        draw_memory_timeline("frugal", timeline, {}, int(1.1 * timeline.total.max())),
        draw_memory_timeline("frugal", timeline, {}, None, DARK),
    ]
    assert len({plain, *others}) == 5
