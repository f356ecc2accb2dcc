"""The site has a place for every page and every public name, and its figures are what is drawn.

Read without a build: `make docs` builds it, and checks the links.
"""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

import ndistribute as nd

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def part():
    """Return a function that imports a file of docs/site, as Sphinx does."""
    sys.path.insert(0, str(DOCS / "site"))
    yield importlib.import_module
    sys.path.remove(str(DOCS / "site"))


def test_every_page_is_in_the_sidebar(part):
    listed = [
        (DOCS / path).resolve()
        for _, entries in part("reference").sections((DOCS / "index.md").read_text())
        for _, path in entries
    ]
    assert len(listed) == len(set(listed))
    pages = {*DOCS.glob("*.md"), DOCS.parent / "CONTRIBUTING.md", DOCS.parent / "CHANGELOG.md"}
    assert pages - {*listed} == {DOCS / "index.md"}
    assert all(path.exists() for path in listed)


def test_every_public_name_has_one_place_in_the_reference(part):
    reference = part("reference")
    placed = [name for names in reference.places().values() for name in names]
    assert len(placed) == len(set(placed))
    assert set(reference.public_names().values()) <= {*placed}
    assert {"layers.Dense", "MirroredStrategy", "errors.TracingError"} <= {*placed}
    assert all(reference.find(name) is not None for name in placed)


def test_internal_methods_exist_and_have_no_place(part):
    reference = part("reference")
    classes = reference.classes()
    assert [n for n in reference.INTERNAL if not any(hasattr(kind, n) for kind in classes)] == []
    assert not reference.INTERNAL.intersection(*map(reference.members, classes))
    assert set(classes.values()) >= reference.MADE
    assert "serial" not in reference.members(nd.Strategy)


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("nd.Variable", "Variable"),
        ("GradientTape", "GradientTape"),
        ("strategy.run(step)", "Strategy.run"),
        ("MirroredStrategy.run", "Strategy.run"),
        ("nd.get_replica_context().all_gather", "ReplicaContext.all_gather"),
        ("Dense", "layers.Dense"),
        ("Optimizer", "optimizers.Optimizer"),
        ("apply_gradients", "optimizers.Optimizer.apply_gradients"),
        ("fit", "Model.fit"),
        ("nd.device", "device"),
        ("device", None),
        ("nd.layers", "layers"),
        ("layers", None),
        ("run", None),
        ("tf.Variable", None),
        ("x = 1", None),
    ],
)
def test_a_name_in_backticks_leads_to_its_page(part, text, goal):
    assert part("reference").target(text) == goal


def test_a_constructor_shows_what_it_passes_on(part):
    constructor = part("reference").constructor
    for kind in part("reference").classes():
        shown = constructor(kind)
        assert "args" not in shown.parameters or "kwargs" not in shown.parameters, kind
    assert list(constructor(nd.layers.RandomCrop).parameters)[:2] == ["height", "width"]
    assert {"units", "name", "dtype"} <= constructor(nd.layers.Dense).parameters.keys()
    assert constructor(nd.Variable) == inspect.signature(nd.Variable).replace(
        return_annotation=inspect.Signature.empty
    )


def test_arguments_are_shown_as_a_program_writes_them(part):
    readable = part("reference").readable
    assert readable("(x: ~typing.Any, *args: ~typing.Any, **kw: ~typing.Any)") == "(x: Any, ...)"
    assert readable("(dtype: Any = <class 'numpy.int64'>)") == "(dtype: Any = np.int64)"


def test_a_drawing_becomes_boxes_lines_and_words(part):
    svg = part("figures").svg("┌─ a ─┐   ╔═══╗\n│ `x` ├──▶║ v ║\n└─────┘   ╚═══╝\n", "a & v")
    assert svg.count("<rect") == 2
    assert svg.count('class="box state"') == 1
    assert svg.count('class="head"') == 1
    assert [word in svg for word in (">a<", ">x<", ">v<", "a &amp; v")] == [True] * 4
