import html.parser
from pathlib import Path
from typing import Any

import pytest

from stages.report.findings import caveats, conditions, findings
from stages.report.page import html_page, markdown_page
from stages.report.rows import Comparison
from tests.report.variant_results import build, edit_json

_PNG = {"memory": b"\x89PNG light", "speed": b"\x89PNG light"}
_LINKS = {"memory": "figures/memory.png"}


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "source", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_closed_and_loads_nothing(comparison: Comparison) -> None:
    page = html_page(comparison, _PNG, _PNG)
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    names = [name for name, _ in tags.attributes]
    assert names.count("img") == 2
    assert not {"script", "link", "iframe", "a"} & set(names)
    for name, attributes in tags.attributes:
        if name in ("img", "source"):
            assert str(attributes.get("src", attributes.get("srcset"))).startswith("data:image/png;base64,")
    assert "url(" not in page and "@import" not in page


def test_text_of_a_model_is_only_text(comparison: Comparison) -> None:
    page = html_page(comparison, _PNG, _PNG)
    assert "<b>Treasury" not in page
    assert "&lt;b&gt;Treasury" in page
    assert "<strong>In the war</strong> with Mexico" in page


def test_markdown_page(comparison: Comparison) -> None:
    page = markdown_page(comparison, _LINKS)
    assert "| frugal " in page
    assert "](figures/memory.png)" in page
    assert "### frugal\n\n> **My fellow citizens,** the" in page
    assert "CPU (AMD EPYC, 2 threads)" in page
    assert "live tensor bytes" in page


def test_samples_are_left_out_where_there_are_none(comparison: Comparison) -> None:
    for path in Path("results/evaluate").glob("*.samples.md"):
        path.write_text("# no prompts: samples\n")
    Path("results/evaluate/frugal.samples.md").unlink()
    assert "## Samples" not in markdown_page(build(), _LINKS)


def test_findings(comparison: Comparison) -> None:
    frugal = findings(comparison)[-1]
    assert (frugal.variant, frugal.memory, frugal.speed) == (
        "frugal",
        "87 % less peak memory",
        "1.50× the speed",
    )


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.001, 0.003), ": worse"),
        ((-0.003, -0.001), ": better"),
        ((-0.001, 0.003), ": no difference shown"),
        ((-0.00001, 0.00002), "the same bits per byte to four decimals"),
        (None, "+0.0010 bits per byte"),
    ],
)
def test_verdict_on_the_loss(
    comparison: Comparison, interval: tuple[float, float] | None, verdict: str
) -> None:
    row = comparison.rows[1].model_copy(update={"delta_bits_per_byte": 0.001, "delta_ci95": interval})
    told = findings(Comparison((comparison.rows[0], row), comparison.results, 100, comparison.recipes))
    assert told[0].loss.endswith(verdict)


def test_caveats_name_what_holds(comparison: Comparison) -> None:
    told = " ".join(caveats(comparison))
    assert "CPU figures" in told
    assert "25 validation documents are few" in told
    assert "one seed" in told.replace("with one seed", "one seed")
    assert "different devices" not in told
    assert "skipped" not in told


def test_a_plan_for_another_device_is_said(comparison: Comparison) -> None:
    edit_json(Path("results/plan/frugal.json"), device="cuda")
    told = " ".join(caveats(build()))
    assert "The peak of frugal was predicted for another kind of device" in told
    assert "predicted for another" not in " ".join(caveats(comparison))


def test_mixed_devices_are_said_everywhere(comparison: Comparison) -> None:
    edit_json(Path("results/measurements/frugal.json"), device={"kind": "cuda", "name": "NVIDIA H200"})
    mixed = build()
    told = " ".join(caveats(mixed))
    assert "NVIDIA H200: frugal" in told
    assert "CPU (AMD EPYC, 2 threads): baseline, amp_checkpointing, compiled_accumulated" in told
    assert findings(mixed)[-1].speed == "14.7 k tokens/s on NVIDIA H200, no ratio"
    assert dict(conditions(mixed))["devices"] == "CPU (AMD EPYC, 2 threads); NVIDIA H200"
    for page in (markdown_page(mixed, _LINKS), html_page(mixed, _PNG, _PNG)):
        assert "no ratio is given against a reference on another device" in page


def test_a_halved_micro_batch_is_said(comparison: Comparison) -> None:
    halved = {"micro_batch_size": 1, "accumulation_steps": 8}
    note = {"out_of_memory": [{"after_step": 40, "micro_batch_size": 1}]}
    edit_json(Path("models/frugal/training.json"), **halved, **note)
    comparison = build()
    assert "frugal ran out of memory and went on with micro-batches of 1" in " ".join(caveats(comparison))
    (row,) = [row for row in comparison.rows if row.variant == "frugal"]
    assert (row.micro_batch_size, row.accumulation_steps) == (1, 8)


def test_skipped_steps_are_said(comparison: Comparison) -> None:
    edit_json(Path("models/frugal/training.json"), skipped_steps=3)
    assert "(frugal 3)" in " ".join(caveats(build()))
