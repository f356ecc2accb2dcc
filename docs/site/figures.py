"""Diagrams: drawings in characters on a page, which the site shows as SVG.

On the repository's web view the drawing is what it is; on the site its lines become lines, in the
colours of the page. Boxes of double lines hold variables. Text in backticks is code.
"""

import re
from collections.abc import Iterator
from html import escape

WIDTH, HEIGHT = 8, 18  # Of a character, in pixels.
# The sides of its cell that a character joins with the middle: left, right, up, down.
LINES = {
    **dict(zip("─│┌┐└┘├┤┬┴┼", "LR UD RD LD RU LU UDR UDL LRD LRU LRUD".split(), strict=True)),
    **dict(zip("═║╔╗╚╝", "LR UD RD LD RU LU".split(), strict=True)),
    **dict(zip("┄┆▶◀▲▼", "LR UD L R D U".split(), strict=True)),
}
CORNERS = "┌┐└┘╔╗╚╝"
HEADS = {"▶": (1, 0), "◀": (-1, 0), "▲": (0, -1), "▼": (0, 1)}
_ENDS = {"L": (-1, 0), "R": (1, 0), "U": (0, -1), "D": (0, 1)}
_TEXT = re.compile(r"`[^`]+`|[^\s`{0}]+(?: [^\s`{0}]+)*".format("".join(LINES)))


def svg(drawing: str, label: str) -> str:
    """Return a drawing in characters as SVG, with a label for those who hear the page."""
    rows = drawing.rstrip().splitlines()
    width, height = WIDTH * max(map(len, rows)), HEIGHT * len(rows)
    shapes = "".join([*_boxes(rows), *_lines(rows), *_texts(rows)])
    return (
        f'<svg class="drawing" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {width} {height}" width="{width}" style="min-width: {width * 3 // 4}px">'
        f"{shapes}</svg>"
    )


def _boxes(rows: list[str]) -> Iterator[str]:
    """Yield a filled rectangle for each box, outer ones first."""
    for kind, (corner, right, below, down) in {
        "box": ("┌", "┐", "└", "│├┤┼"),
        "box state": ("╔", "╗", "╚", "║"),
    }.items():
        for top, row in enumerate(rows):
            # A title may interrupt the upper line.
            for match in re.finditer(f"{corner}[─═┬┴┼][^│║┌╔┐╗▶◀]*{right}", row):
                left, end = match.start(), match.end() - 1
                bottom = top + 1
                while bottom < len(rows) and _at(rows, left, bottom) in down:
                    bottom += 1
                if _at(rows, left, bottom) == below:
                    x, y = (left + 0.5) * WIDTH, (top + 0.5) * HEIGHT
                    size = (end - left) * WIDTH, (bottom - top) * HEIGHT
                    yield '<rect class="{}" x="{}" y="{}" width="{}" height="{}" rx="4"/>'.format(
                        kind, x, y, *size
                    )


def _at(rows: list[str], column: int, row: int) -> str:
    return rows[row][column : column + 1] or " " if row < len(rows) else " "


def _lines(rows: list[str]) -> Iterator[str]:
    """Yield the lines between the boxes, and their own, and the heads of arrows."""
    paths: dict[str, str] = {"line": "", "line dashed": "", "head": ""}
    for row, text in enumerate(rows):
        for column, character in enumerate(text):
            x, y = (column + 0.5) * WIDTH, (row + 0.5) * HEIGHT
            kind = "line dashed" if character in "┄┆" else "line"
            sides = [_ENDS[side] for side in LINES.get(character, "")]
            ends = [f"{x + dx * WIDTH / 2} {y + dy * HEIGHT / 2}" for dx, dy in sides]
            if character in CORNERS:
                paths[kind] += f"M{ends[0]}Q{x} {y} {ends[1]}"
            else:
                paths[kind] += "".join(f"M{x} {y}L{end}" for end in ends)
            if character in HEADS:
                dx, dy = HEADS[character]
                paths["head"] += (
                    f"M{x + 4 * dx} {y + 4 * dy}L{x - 4 * dx - 4 * dy} {y - 4 * dy + 4 * dx}"
                    f"L{x - 4 * dx + 4 * dy} {y - 4 * dy - 4 * dx}z"
                )
    yield from (f'<path class="{kind}" d="{path}"/>' for kind, path in paths.items() if path)


def _texts(rows: list[str]) -> Iterator[str]:
    """Yield the words, each run of them around its middle, as letters are narrower than cells."""
    for row, text in enumerate(rows):
        for match in _TEXT.finditer(text):
            words = match[0]
            kind = "code" if words[0] == "`" else "words"
            x = match.start() * WIDTH if kind == "code" else (match.start() + match.end()) * 4
            y = (row + 0.5) * HEIGHT
            yield f'<text class="{kind}" x="{x}" y="{y}">{escape(words.strip("`"))}</text>'
