"""The sidebar: the lists of links on docs/index.md, as the toctrees that Sphinx wants.

So the list that a reader of the repository sees is the only one.
"""

import re
from collections.abc import Iterator
from typing import Any

import reference

_SECTION = re.compile(r"^## (?P<caption>.+)\n(?P<body>(?:(?!## ).*\n?)*)", re.MULTILINE)
_ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<path>[^)#]+\.md)\)", re.MULTILINE)


def sections(page: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the caption of each section, and the title and path of each page that it lists."""
    for section in _SECTION.finditer(page):
        entries = _ENTRY.findall(section["body"])
        if entries:
            yield section["caption"], entries


def add_toctrees(_app: Any, docname: str, source: list[str]) -> None:
    """Append a toctree for each section of the first page, and all names to the reference."""
    if docname == "docs/index":
        for caption, entries in [*sections(source[0])]:
            links = "".join(f"{title} <{path}>\n" for title, path in entries)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{links}```\n"
    if docname == "docs/reference":
        source[0] += f"\n```{{eval-rst}}\n{reference.overview()}```\n"
