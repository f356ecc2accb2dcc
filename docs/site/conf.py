"""How `make docs` builds the site from the pages in docs/ and the docstrings of the package.

The source folder is the repository, so that links between files mean the same here and on its web
view. The list on docs/index.md is the sidebar, too.
"""

import sys
from enum import Enum
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.inspect import signature, stringify_signature
from sphinx.util.nodes import make_refnode

import ndistribute

sys.path.insert(0, str(Path(__file__).parent))
import contents
import figures
import reference

project = "ndistribute"
author = "The ndistribute authors"
release = ndistribute.__version__
root_doc = "docs/index"
folders = ("benchmarks", "deploy", "examples")
include_patterns = ["docs/**", "*.md", *(f"{folder}/README.md" for folder in folders)]
exclude_patterns = ["docs/site"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
default_role = "code"  # The docstrings write code in single backticks, as Markdown does.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
html_theme = "furo"
html_title = f"ndistribute {release}"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_copyright = False
toc_object_entries_show_parents = "hide"
pygments_style, pygments_dark_style = "default", "github-dark"


class Diagram(Directive):
    """A fenced block ``{diagram} what it shows`` with a drawing in characters."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the drawing with its caption."""
        (caption,) = self.arguments
        figure = nodes.figure(classes=["diagram"])
        figure += nodes.raw("", figures.svg("\n".join(self.content), caption), format="html")
        figure += nodes.caption(caption, caption)
        return [figure]


class LinkNames(SphinxPostTransform):
    """Link each public name in backticks to its page."""

    default_priority = 900

    def run(self, **_: Any) -> None:
        """Wrap the literals of a page that `reference.targets` knows in links."""
        page = self.env.docname
        objects = self.env.domains.python_domain.objects
        for literal in [*self.document.findall(nodes.literal)]:
            name = f"nd.{reference.target(literal.astext())}"
            if name not in objects or isinstance(literal.parent, nodes.reference | nodes.title):
                continue
            home = objects[name]
            if home.docname != page:
                link = make_refnode(
                    self.app.builder, page, home.docname, home.node_id, literal.deepcopy(), name
                )
                literal.replace_self(link)


def show_constructor(
    _app: Sphinx, _what: str, _name: str, thing: Any, _options: Any, arguments: str | None, _: Any
) -> Any:
    """Return the arguments of a class with those that its constructor passes on."""
    if arguments is None or not isinstance(thing, type):
        return None
    shown = reference.constructor(thing, signature)
    if issubclass(thing, Enum) or (issubclass(thing, BaseException) and not shown.parameters):
        return "", ""
    return stringify_signature(shown, show_return_annotation=False, unqualified_typehints=True), ""


def collapse(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _: Any) -> None:
    """Open only the current branch of the sidebar: with all names, each page would weigh 100 KB."""
    toctree = context["toctree"]
    context["toctree"] = lambda **options: toctree(**{**options, "collapse": True})


def lead_to_the_first_page(app: Sphinx, failure: Exception | None) -> None:
    """Let the root of the site lead to its first page."""
    if failure is None:
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">'
        Path(app.outdir, "index.html").write_text(page)


def setup(app: Sphinx) -> None:
    """Write the pages of the reference, and connect the functions above."""
    reference.name_modules()
    reference.write_pages(Path(app.srcdir, "docs", "reference"))
    app.add_directive("diagram", Diagram)
    app.add_post_transform(LinkNames)
    app.connect("source-read", contents.add_toctrees)
    app.connect("autodoc-process-signature", show_constructor)
    app.connect("html-page-context", collapse, priority=400)
    app.connect("build-finished", lead_to_the_first_page)
