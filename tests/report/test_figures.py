import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.report.figures import FIGURES, draw_figures
from stages.report.loss_figures import moving_average, spread
from stages.report.style import DARK, LIGHT
from tests.report.variant_results import build, edit_json, write_results


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_results(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_same_comparison_gives_the_same_bytes(results: Path) -> None:
    comparison = build()
    first, second = draw_figures(comparison), draw_figures(comparison)
    assert tuple(first) == FIGURES
    assert first == second
    for png in first.values():
        assert png.startswith(b"\x89PNG")
        assert b"Software" not in png
        width, height = struct.unpack(">II", png[16:24])
        assert width == 1440
        assert 400 < height < 1200


def test_themes_differ_and_a_users_style_does_not_matter(results: Path) -> None:
    import matplotlib

    comparison = build()
    light = draw_figures(comparison, LIGHT)
    assert light != draw_figures(comparison, DARK)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        assert draw_figures(comparison, LIGHT) == light


def test_every_number_reaches_its_figure(results: Path) -> None:
    before = draw_figures(build())
    edit_json(Path("results/measurements/frugal.json"), tokens_per_second=5_000.0)
    after = draw_figures(build())
    assert {name for name in FIGURES if after[name] != before[name]} == {"speed"}
    edit_json(Path("results/plan/frugal.json"), predicted_allocated_bytes=2**28)
    last = draw_figures(build())
    assert {name for name in FIGURES if last[name] != after[name]} == {"memory"}


@pytest.mark.parametrize("variants", [1, 2])
def test_few_variants_and_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variants: int) -> None:
    write_results(tmp_path, steps=2, documents=1)
    monkeypatch.chdir(tmp_path)
    text = Path("params.yaml").read_text()
    cut = {1: "  amp_checkpointing:", 2: "  compiled_accumulated:"}[variants]
    Path("params.yaml").write_text(text[: text.index(cut)])
    comparison = build()
    assert len(comparison.rows) == variants
    assert set(draw_figures(comparison)) == set(FIGURES)


def test_long_curves_are_smoothed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_results(tmp_path, steps=3000)
    monkeypatch.chdir(tmp_path)
    assert set(draw_figures(build())) == set(FIGURES)


def test_moving_average() -> None:
    assert moving_average(np.array([0.0, 3.0, 6.0, 3.0]), 3) == pytest.approx([1.5, 3.0, 4.0, 4.5])
    assert moving_average(np.full(50, 2.0), 7) == pytest.approx(np.full(50, 2.0))


@given(st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=11))
def test_spread_keeps_labels_apart_in_order_and_inside(wanted: list[float]) -> None:
    places = spread(wanted, gap=0.1, low=0.0, high=1.0)
    order = np.argsort(wanted, kind="stable")
    assert (np.diff(np.array(places)[order]) > 0.1 - 1e-9).all()
    assert min(places) > -1e-9
    assert max(places) < 1 + 1e-9


def test_spread_leaves_distant_labels_alone() -> None:
    assert spread([0.9, 0.1, 0.5], gap=0.1, low=0.0, high=1.0) == pytest.approx([0.9, 0.1, 0.5])


def test_spread_centres_labels_that_want_one_place() -> None:
    assert spread([0.5, 0.5, 0.5], gap=0.1, low=0.0, high=1.0) == pytest.approx([0.4, 0.5, 0.6])
    assert spread([0.5] * 21, gap=0.1, low=0.0, high=1.0)[-1] == pytest.approx(1.0)
