"""docs/cloud.md: the files, commands and variables that it names are there."""

import re
import shlex
from pathlib import Path

import pytest

from tests.cloud.tools import ROOT

PAGE = (ROOT / "docs/cloud.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# Without comments, with continued lines joined.
_LINES = [
    re.sub(r"\s+#.*", "", line).strip()
    for block in _BLOCKS
    for line in block.replace("\\\n", " ").split("\n")
]


def _commands(program: str) -> list[str]:
    parts = [part for line in _LINES for part in line.split("&&")]
    return sorted({part.strip() for part in parts if part.strip().startswith(f"{program} ")})


@pytest.mark.parametrize("command", _commands("dvc"))
def test_dvc_commands_and_their_options_exist(command: str) -> None:
    from dvc.cli import parse_args

    assert parse_args(shlex.split(command)[1:]).func is not None


def test_commands_were_found() -> None:
    assert len(_commands("dvc")) >= 5 and len(_commands("docker")) >= 8 and len(_commands("sky")) == 2


def test_files_exist() -> None:
    inline = re.findall(r"`([\w./-]+/[\w.-]+\.(?:md|py|yaml|yml|sh))`", PAGE)
    words = [word for line in _LINES for word in line.split() if word.startswith(("docker/", "presets/"))]
    links = [f"docs/{link}" for link in re.findall(r"\]\(([\w./-]+\.md)\)", PAGE)]
    paths = {*inline, *words, *links}
    assert {"docker/cloud/skypilot.yaml", "docker/cloud/spot.py", "docs/planning.md"} <= paths
    assert not sorted(path for path in paths if not (ROOT / path).exists())


def test_headings_that_are_linked_exist() -> None:
    slugs = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    }
    linked = re.findall(r"\]\(#([\w-]+)\)", PAGE)
    assert len(linked) > 8 and set(linked) <= slugs


def test_variables_of_this_project_are_read_by_it() -> None:
    sources = [
        *(ROOT / "docker").rglob("*.*"),
        ROOT / "Dockerfile",
        *(ROOT / "stages").rglob("*.py"),
    ]
    read = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.is_file())
    named = set(re.findall(r"\bFRUGAL_\w+", PAGE))
    assert len(named) > 4
    assert not {name for name in named if not re.search(rf"\b{name}\b", read)}


def test_the_pins_of_the_page_are_those_that_are_tested() -> None:
    pins = (Path(__file__).with_name("requirements.txt")).read_text().splitlines()
    named = [f"{tool}=={version}" for tool, version in re.findall(r"(\w+)\[\w+\]==([\d.]+)", PAGE)]
    assert len(named) == 2 and set(named) <= set(pins)
