"""The documentation is true: its programs run, its examples print what it says, its links lead.

A fenced block marked ``python`` is run; the blocks of one page share their names and an empty
folder, from top to bottom. One marked ``pycon`` is a session whose output is compared, in the same
names. Blocks with any other mark, or none, are for reading. ``python torch`` is run where that
package is installed (see `make guests-test`).
"""

import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ndistribute as nd

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<mark>\w*)(?P<needs>[^\n]*)$")
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)(?: \"[^\"]*\")?\)")
_LISTED = re.compile(r"^\.\. auto(?:class|function|module):: (\S+)$", re.MULTILINE)
_HEADING = re.compile(r"^#+ +(?P<title>.+?) *#*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its mark, its text, the number of its first line, what it needs."""

    mark: str
    text: str
    line: int
    needs: tuple[str, ...] = ()


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    opened: tuple[str, str, int, tuple[str, ...]] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.splitlines(), start=1):
        match = _FENCE.match(line)
        if opened is None:
            if match:
                needs = tuple(match["needs"].split())
                opened, lines = (match["fence"], match["mark"], number + 1, needs), []
        elif line.strip() == opened[0]:
            found.append(Block(opened[1], "\n".join(lines) + "\n", *opened[2:]))
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        raise ValueError(f"the block that opens before line {opened[2]} is never closed")
    return found


def run_blocks(page: str, name: str) -> None:
    """Run what a page shows; an error or another output raises."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.mark == "python" and all(map(find_spec, block.needs)):
            # Blank lines before it give the block its own line numbers in a traceback.
            code = compile("\n" * (block.line - 1) + block.text, name, "exec", dont_inherit=True)
            exec(code, names)
        elif block.mark == "pycon":
            _run_session(block, names, name)


def _run_session(block: Block, names: dict[str, Any], name: str) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    session = doctest.DocTestParser().get_doctest(block.text, names, name, name, block.line - 1)
    session.globs = names
    report: list[str] = []
    doctest.DocTestRunner(optionflags=options).run(session, out=report.append, clear_globs=False)
    if report:
        raise AssertionError("".join(report))


def broken_links(page: str, path: Path) -> Iterator[str]:
    """Yield the relative links of a page that lead nowhere, to a file or to a heading."""
    prose = page
    for block in blocks_of(page):
        prose = prose.replace(block.text, "\n")
    for match in _LINK.finditer(prose):
        if not re.match(r"[a-z]+:", match["target"]) and not _leads(match["target"], page, path):
            yield match["target"]


def _leads(target: str, page: str, path: Path) -> bool:
    name, _, anchor = target.partition("#")
    goal = (path.parent / name).resolve() if name else path
    if name and not goal.exists():
        return False
    return not anchor or anchor in _anchors(goal.read_text() if name else page)


def _anchors(page: str) -> set[str]:
    titles = (match["title"].lower() for match in _HEADING.finditer(page))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(path.read_text(), str(path))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_links_lead_somewhere(path):
    assert list(broken_links(path.read_text(), path)) == []


def test_the_reference_lists_every_public_name():
    listed = set(_LISTED.findall((ROOT / "docs/reference/index.rst").read_text()))
    modules = {name for name in nd.__all__ if isinstance(getattr(nd, name), ModuleType)}
    errors = {name for name in nd.__all__ if hasattr(nd.errors, name)}
    assert set(nd.__all__) - listed - modules - errors == {"__version__"}
    assert "ndistribute.errors" in listed


def test_a_failing_block_is_caught_with_its_line():
    page = "# Title\n\n```python\nx = 1\n```\n\n```python\nx / 0\n```\n"
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(page, "page.md")
    assert caught.traceback[-1].lineno + 1 == 8


def test_a_session_that_prints_something_else_is_caught():
    page = "```python\nx = 1\n```\n\n```pycon\n>>> x + 1\n3\n```\n"
    with pytest.raises(AssertionError, match="Got:\n    2"):
        run_blocks(page, "page.md")


def test_a_session_shares_the_names_of_the_page():
    run_blocks("```pycon\n>>> x = 1\n>>> x\n1\n```\n\n```python\ny = x + 1\n```\n", "page.md")


def test_a_link_to_nowhere_is_caught(tmp_path):
    page = "# A title\n[ok](#a-title) [no](#b) [no](gone.md) [out](https://example.org/x)\n"
    assert list(broken_links(page, tmp_path / "page.md")) == ["#b", "gone.md"]


def test_an_unclosed_block_is_caught():
    with pytest.raises(ValueError, match="never closed"):
        blocks_of("```python\nx = 1\n")
