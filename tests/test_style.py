"""What a reader may count on in every file of the package, beyond what the linter knows.

docs: CONTRIBUTING.md, "How the code reads". A rule that is broken names the file and the line.
"""

import ast
import functools
import inspect
import io
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import ndistribute as nd

PACKAGE = Path(__file__).parents[1] / "ndistribute"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
parsed = functools.cache(ast.parse)
UNFINISHED = ("TODO", "FIXME", "XXX", "HACK")
# The most lines of code of each folder of the package, without blanks, comments and docstrings.
# A change that needs more raises a number here, and its message says why.
BUDGETS = {
    "autodiff": 2845,
    "cluster": 673,
    "collective": 4666,
    "compat": 3966,
    "coordinator": 921,
    "data": 2941,
    "estimator": 1506,
    "graph": 4767,
    "interop": 1137,
    "jit": 1658,
    "launcher": 2115,
    "models": 7530,
    "optimizers": 1056,
    "parameter_server": 2196,
    "strategies": 2389,
    "task": 303,
    "top level": 3423,
    "transport": 2037,
    "variables": 1154,
}
# The same for the tests as a whole.
TESTS_BUDGET = 45818
# Names that say nothing of what they name.
VAGUE = {"one", "found", "own", "given"}
# Classes whose name another one has, as users see it: every other class has a name of its own.
SHARED_CLASSES = {
    **dict.fromkeys(
        (
            *("BinaryCrossentropy", "CategoricalCrossentropy", "SparseCategoricalCrossentropy"),
            *("MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredError"),
            "CosineSimilarity",
        ),
        "Keras has a loss and a metric of this name",
    ),
    "Checkpoint": "compat: messages begin with it, as in TensorFlow's programs",
    "Model": "compat: exported files and default names of models contain it",
    "RunOptions": "TensorFlow has options of a session's run and of a strategy's by this name",
    "Sequential": "compat: exported files and default names of models contain it",
    "Tensor": "compat: programs ask isinstance(x, tf.Tensor), and graph.Tensor is public",
}


def long_file(source: str) -> Iterator[str]:
    """One concept a file."""
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"1: {lines} lines, more than {MAX_FILE_LINES}"


def long_function(source: str) -> Iterator[str]:
    """A function is read on one screen; its docstring is not counted."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _lines(node) - (_lines(node.body[0]) if ast.get_docstring(node) else 0)
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines, over {MAX_FUNCTION_LINES}"


def asserting(source: str) -> Iterator[str]:
    """What a user can get wrong is an exception that says so, under ``python -O`` as well."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Assert):
            yield f"{node.lineno}: an assert statement"


def printing(source: str) -> Iterator[str]:
    """A library logs, and leaves the terminal to the program."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print":
            yield f"{node.lineno}: a call of print"


def unfinished(source: str) -> Iterator[str]:
    """Nothing is left for later in a comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and any(word in token.string for word in UNFINISHED):
            yield f"{token.start[0]}: {token.string}"


def unintroduced(source: str) -> Iterator[str]:
    """A file opens with why it exists."""
    if not ast.get_docstring(parsed(source)):
        yield "1: no docstring"


def vague(source: str) -> Iterator[str]:
    """An argument, a variable or an attribute is named after what it is."""
    for node in ast.walk(parsed(source)):
        for name in VAGUE & {getattr(node, field, None) for field in ("arg", "attr", "id", "name")}:
            yield f"{node.lineno}: a name that says nothing: {name}"


def repeated(names: Iterable[str]) -> set[str]:
    """Return the names that occur more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


def classes(source: str) -> Iterator[str]:
    """Yield the names of the classes of a file."""
    yield from (n.name for n in ast.walk(parsed(source)) if isinstance(n, ast.ClassDef))


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def code_lines(source: str) -> int:
    """Return the number of lines with code, which blank lines, comments and docstrings are not."""
    silent = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(parsed(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


RULES = (long_file, long_function, asserting, printing, unfinished, unintroduced, vague)
Rule = Callable[[str], Iterator[str]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule):
    broken = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE.parent).as_posix()
        if not (rule is printing and name == "ndistribute/cli.py"):
            broken += [f"{name}:{what}" for what in rule(path.read_text())]
    assert not broken, "\n".join(broken)


def test_folders_keep_to_their_budgets():
    lines = dict.fromkeys(BUDGETS, 0)
    for path in PACKAGE.rglob("*.py"):
        folder, *inside = path.relative_to(PACKAGE).parts
        name = folder if inside else "top level"
        lines[name] = lines.get(name, 0) + code_lines(path.read_text())
    over = {
        n: f"{count} > {BUDGETS.get(n, 0)}"
        for n, count in lines.items()
        if count > BUDGETS.get(n, 0)
    }
    assert over == {}


def test_the_tests_keep_to_their_budget():
    lines = sum(code_lines(path.read_text()) for path in Path(__file__).parent.rglob("*.py"))
    assert lines <= TESTS_BUDGET


def test_code_is_counted_without_comments_and_docstrings():
    function = 'def f():\n    """Words."""\n    return (\n        x\n    )\n'
    assert code_lines('"""Words."""\n\nx = 1  # Said.\n# More.\n\n\n' + function) == 5


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (long_file, "x = 1\n" * (MAX_FILE_LINES + 1)),
        (long_function, "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
        (asserting, "def f(x):\n    assert x\n"),
        (printing, "print('hello')\n"),
        (unfinished, "x = 1  # " + UNFINISHED[0] + ": later\n"),
        (unintroduced, "x = 1\n"),
        (vague, "def f(one):\n    return 1\n"),
        (vague, "found = 1\n"),
        (vague, "x.own = 1\n"),
        (vague, "try: pass\nexcept ValueError as given: pass\n"),
    ],
)
def test_a_broken_rule_is_caught(rule: Rule, source: str):
    assert len(list(rule(source))) == 1


def test_class_names_are_unique():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    assert repeated(name for source in sources for name in classes(source)) == {*SHARED_CLASSES}


def test_file_names_are_unique():
    names = repeated(path.name for path in PACKAGE.rglob("*.py"))
    assert names == {"__init__.py"}


def test_a_repeated_name_is_caught():
    nested = "def f():\n    class A: pass\n"
    assert repeated([*classes("class A: pass\n"), *classes(nested), *classes("A = 1\n")]) == {"A"}
    assert repeated(["spec.py", "specs.py", "tape.py"]) == set()


def test_a_docstring_makes_no_function_long():
    source = 'def f():\n    """\n' + "    Line.\n" * MAX_FUNCTION_LINES + '    """\n    return 1\n'
    assert list(long_function(source)) == []


def test_public_names_exist():
    assert [name for name in nd.__all__ if not hasattr(nd, name)] == []


def test_public_names_show_how_to_use_them():
    silent = []
    for name in nd.__all__:
        thing = getattr(nd, name)
        documented = callable(thing) and not _is_exception(thing)
        if documented and ">>> " not in (thing.__doc__ or ""):
            silent.append(name)
    assert not silent, "\n".join(silent)


def test_public_methods_are_described():
    """A description that is inherited counts."""
    silent = []
    for name in nd.__all__:
        thing = getattr(nd, name)
        for member, value in inspect.getmembers(thing) if inspect.isclass(thing) else ():
            described = inspect.isroutine(value) or isinstance(value, property)
            if described and not member.startswith("_") and not inspect.getdoc(value):
                silent.append(f"{name}.{member}")
    assert not silent, "\n".join(silent)


def _is_exception(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)
