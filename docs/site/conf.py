"""How `make docs` builds the site from the pages in docs/ and the docstrings of the package.

The source folder is the repository, so that links between files mean the same here and on its web
view. The list on docs/index.md is the sidebar, too.
"""

import re
import sys
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import furo
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.inspect import signature, stringify_signature
from sphinx.util.nodes import make_refnode

with mock(["jax", "torch"]):  # The modules for other libraries need not find these.
    import ndistribute.interop.horovod
    import ndistribute.interop.jax
    import ndistribute.interop.keras

sys.path.insert(0, str(Path(__file__).parent))
import figures
import reference

project, author = "ndistribute", "The ndistribute authors"
release = ndistribute.__version__
root_doc = "docs/index"
folders = ("benchmarks", "deploy", "examples")
include_patterns = ["docs/**", "*.md", *(f"{folder}/README.md" for folder in folders)]
exclude_patterns = ["docs/site"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
default_role = "code"  # The docstrings write code in single backticks, as Markdown does.
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
html_theme = "furo"
html_title = f"ndistribute {release}"
html_static_path = ["static"]
html_css_files, html_js_files = ["style.css"], ["sidebar.js"]
html_search_scorer = str(Path(__file__).parent / "static" / "scorer.js")
html_extra_path = ["static/index.html"]  # The root of the site leads to its first page.
html_copy_source = html_show_copyright = html_domain_indices = False
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
            name = f"nd.{reference.target(literal.astext(), page)}"
            if name not in objects or isinstance(literal.parent, nodes.reference | nodes.title):
                continue
            home = objects[name]
            if home.docname != page:
                to, builder = (home.docname, home.node_id), self.app.builder
                literal.replace_self(make_refnode(builder, page, *to, literal.deepcopy(), name))


def show_signature(
    _app: Sphinx, _what: str, _name: str, thing: Any, _options: Any, shown: str | None, returns: Any
) -> Any:
    """Return the arguments; those of a class with the ones that its constructor passes on."""
    if shown is None or not isinstance(thing, type):
        return shown and (reference.readable(shown), returns)
    arguments = reference.constructor(thing, signature)
    if issubclass(thing, Enum) or not arguments.parameters:
        return "", ""
    text = stringify_signature(arguments, show_return_annotation=False, unqualified_typehints=True)
    return reference.readable(text), ""


def put_example_first(*event: Any) -> None:
    """Move an example at the end of a docstring before its sections, such as that of arguments."""
    lines: list[str] = event[-1]
    starts = [k for k, line in enumerate(lines) if re.match(r">>>|[A-Z]\w+:$", line)]
    examples = [k for k in starts if lines[k][0] == ">"]
    if examples and starts[0] < examples[0]:
        lines[starts[0] :] = [*lines[examples[0] :], *lines[starts[0] : examples[0]]]


def share_sidebar(app: Sphinx, page: str, _template: str, context: dict[str, Any], _: Any) -> None:
    """Give all pages of a group the sidebar of their group, which sidebar.js completes.

    It shows only the names of this group, as 600 of them would weigh 100 KB. To make it for each
    page would take 30 % of the processor time of `make docs`.
    """
    context["toctree"] = lambda **_: sidebar(app.builder, reference.group_pages().get(page, page))


@cache
def sidebar(builder: Any, page: str) -> str:
    """Return the sidebar of a page, with links that other pages of its folder can use."""
    tree = builder._get_local_toctree(page, titles_only=True, includehidden=True, maxdepth=-1)
    return str(tree).replace('href="#"', f'href="{page.rpartition("/")[2]}.html"')


def setup(app: Sphinx) -> None:
    """Write the pages of the reference, and connect the functions above."""
    furo.get_navigation_tree = cache(furo.get_navigation_tree)
    reference.name_modules()
    reference.write_pages(Path(app.srcdir, "docs", "reference"))
    app.add_directive("diagram", Diagram)
    app.add_post_transform(LinkNames)
    app.connect("source-read", reference.add_toctrees)
    app.connect("autodoc-process-signature", show_signature)
    app.connect("html-page-context", share_sidebar, priority=400)
    app.connect("autodoc-process-docstring", put_example_first, priority=400)
