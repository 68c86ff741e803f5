"""The report as a Markdown page with linked figures and as one HTML file that works offline."""

import base64
import html
import re
from collections.abc import Mapping

from markdown_it import MarkdownIt

from stages.report.findings import Finding, caveats, conditions, findings
from stages.report.rows import Comparison
from stages.report.style import DARK, LIGHT
from stages.report.table import Cells, markdown_table, recipe_cells, results_cells

_ALT_TEXTS = {
    "loss_by_tokens": "Training loss against tokens, one line per variant",
    "loss_by_time": "Training loss against wall-clock time, one line per variant",
    "memory": "Peak memory of each variant as bars, with the predicted peak as a marker",
    "memory_timeline": "Predicted live memory of each variant over one step, by what it is made of",
    "speed": "Tokens per second of each variant as bars",
}
_BATCH = "Batch: micro-batches in one optimizer step × sequences in a micro-batch."
_RESULTS = (
    "Bits per byte: of the validation text, lower is better. Δ: against the first variant, ± the wider "
    "half of the 95 % interval. Predicted: peak memory as computed before training. Error: predicted / "
    "measured − 1."
)


def markdown_page(comparison: Comparison, figures: Mapping[str, str]) -> str:
    """The report as Markdown.

    Args:
        figures: name -> path relative to the page, in the order in which they are shown.
    """
    parts = ["# Comparison of the variants"]
    told = [
        f"- **{f.variant}** against {comparison.reference.variant}: {_sentence(f)}"
        for f in findings(comparison)
    ]
    if told:
        parts.append("\n".join(told))
    parts += [
        markdown_table(results_cells(comparison)),
        _RESULTS,
        "## Variants",
        markdown_table(recipe_cells(comparison)),
        _BATCH,
        "## Conditions",
        "\n".join(f"- {name}: {value}" for name, value in conditions(comparison)),
        "## Before you believe it",
        "\n".join(f"- {sentence}" for sentence in caveats(comparison)),
        "## Figures",
        *(f"![{_ALT_TEXTS[name]}]({path})" for name, path in figures.items()),
    ]
    samples = _samples(comparison)
    if samples:
        parts.append("## Samples")
        parts += [f"### {variant}\n\n{text}" for variant, text in samples.items()]
    return "\n\n".join(parts) + "\n"


def html_page(comparison: Comparison, light: Mapping[str, bytes], dark: Mapping[str, bytes]) -> str:
    """The report as one HTML file: figures inside, no script, nothing loaded from elsewhere.

    Args:
        light, dark: the same figures as PNG for either colour scheme, in the order shown.
    """
    reference = comparison.reference.variant
    cards = "".join(
        f'<article style="--c:{LIGHT.colour(place)};--d:{DARK.colour(place)}"><h3>{_escape(f.variant)}</h3>'
        f"<p><strong>{_escape(_capital(f.memory))}</strong></p><p><strong>{_escape(_capital(f.speed))}</strong></p>"
        f"<p class=quiet>{_escape(f.loss)}</p></article>"
        for place, f in enumerate(findings(comparison), start=1)
    )
    lead = " · ".join(
        value for name, value in conditions(comparison) if name in ("device", "devices", "model", "work")
    )
    images = "".join(
        f"<figure><picture><source media='(prefers-color-scheme: dark)' srcset='{_data_url(dark[name])}'>"
        f"<img src='{_data_url(image)}' alt='{_escape(_ALT_TEXTS[name])}'></picture></figure>"
        for name, image in light.items()
    )
    facts = "".join(
        f"<dt>{_escape(_capital(name))}</dt><dd>{_escape(value)}</dd>"
        for name, value in conditions(comparison)
    )
    warnings = "".join(f"<li>{_escape(sentence)}</li>" for sentence in caveats(comparison))
    samples = "".join(
        f"<details{' open' if place == 0 else ''}><summary>{_escape(variant)}</summary>"
        f"<div class=sample>{_render(text)}</div></details>"
        for place, (variant, text) in enumerate(_samples(comparison).items())
    )
    body = [
        f"<header><h1>Comparison of the variants</h1><p class=quiet>{_escape(lead)}</p></header>",
        f"<section><h2>Against {_escape(reference)}</h2><div class=cards>{cards}</div></section>"
        if cards
        else "",
        f"<section><h2>Results</h2>{_html_table(results_cells(comparison), _RESULTS)}</section>",
        f"<section>{images}</section>",
        f"<section><h2>Variants</h2>{_html_table(recipe_cells(comparison), _BATCH)}</section>",
        f"<section><h2>Before you believe it</h2><ul>{warnings}</ul></section>" if warnings else "",
        f"<section><h2>Conditions</h2><dl>{facts}</dl></section>",
        f"<section><h2>Samples</h2>{samples}</section>" if samples else "",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Comparison of the variants</title><style>{_STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _sentence(finding: Finding) -> str:
    return f"{finding.memory}, {finding.speed}, {finding.loss}."


def _samples(comparison: Comparison) -> dict[str, str]:
    """Variant -> its continuations, without the file's own title, for which the page has its own."""
    texts = {
        variant: re.sub(r"\A\s*# .*", "", result.samples).strip()
        for variant, result in comparison.results.items()
    }
    return {variant: text for variant, text in texts.items() if text}


def _render(markdown: str) -> str:
    # The text is a model's: no HTML, no links and no images may come out of it.
    return MarkdownIt("commonmark", {"html": False}).disable(["image", "link", "autolink"]).render(markdown)


def _html_table(cells: Cells, note: str) -> str:
    header = "".join(f"<th>{_escape(name)}</th>" for name in cells.header)
    kinds = [" class=words" if name == "device" else "" for name in cells.header[1:]]
    body = ""
    for first, *others in cells.body:
        columns = "".join(f"<td{kind}>{_escape(cell)}</td>" for kind, cell in zip(kinds, others, strict=True))
        body += f"<tr><th scope=row>{_escape(first)}</th>{columns}</tr>"
    table = f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=table>{table}</div><p class=quiet>{_escape(note)}</p>"


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


_STYLE = f"""
:root {{ --bg:#f5f7f9; --card:{LIGHT.background}; --line:{LIGHT.grid};
  --ink:{LIGHT.ink}; --quiet:{LIGHT.muted} }}
* {{ box-sizing:border-box }}
body {{ margin:0; background:var(--bg); color:var(--ink);
  font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif }}
main {{ max-width:1040px; margin:0 auto; padding:40px 20px 64px }}
h1 {{ font-size:1.9rem; line-height:1.2; margin:0 0 6px }}
h2 {{ font-size:1.15rem; margin:40px 0 12px }}
.quiet {{ color:var(--quiet); margin:0 }}
.cards {{ display:grid; gap:14px; grid-template-columns:repeat(auto-fit,minmax(250px,1fr)) }}
article,figure,.table,details,dl {{ background:var(--card); border:1px solid var(--line);
  border-radius:10px }}
article {{ padding:14px 18px; border-top:4px solid var(--c) }}
article h3 {{ margin:0 0 6px; font-size:1rem; color:var(--c) }}
article p {{ margin:2px 0 }}
article .quiet {{ font-size:.88rem; margin-top:6px }}
.table {{ overflow-x:auto }}
table {{ border-collapse:collapse; width:100%; font-size:.9rem; font-variant-numeric:tabular-nums }}
th,td {{ padding:9px 10px; text-align:right; white-space:nowrap; border-bottom:1px solid var(--line) }}
th:first-child {{ text-align:left }}
td.words {{ white-space:normal; text-align:left }}
thead th {{ color:var(--quiet); font-weight:600; font-size:.82rem }}
tbody tr:last-child > * {{ border-bottom:0 }}
.table + .quiet {{ font-size:.85rem; margin-top:8px }}
figure {{ margin:18px 0; padding:10px; overflow:hidden }}
img {{ display:block; width:100%; height:auto }}
ul {{ margin:0; padding-left:1.2em }}
li {{ margin:6px 0 }}
dl {{ display:grid; grid-template-columns:max-content 1fr; gap:8px 20px; margin:0;
  padding:16px 18px; font-size:.93rem }}
dt {{ color:var(--quiet) }}
dd {{ margin:0; overflow-wrap:anywhere }}
details {{ margin:10px 0; padding:10px 18px }}
summary {{ cursor:pointer; font-weight:600 }}
.sample {{ font-size:.93rem; overflow-wrap:anywhere }}
.sample pre {{ white-space:pre-wrap }}
.sample h3,.sample h4,.sample h5 {{ font-size:.95rem; margin:16px 0 4px }}
.sample blockquote {{ margin:8px 0; padding-left:14px; border-left:3px solid var(--line) }}
@media (max-width:560px) {{
  main {{ padding-top:24px }} dl {{ grid-template-columns:1fr; gap:2px }} dd {{ margin-bottom:10px }}
}}
@media (prefers-color-scheme:dark) {{
  :root {{ --bg:#0d1117; --card:{DARK.background}; --line:{DARK.grid};
    --ink:{DARK.ink}; --quiet:{DARK.muted} }}
  article {{ border-top-color:var(--d) }} article h3 {{ color:var(--d) }}
}}
"""
