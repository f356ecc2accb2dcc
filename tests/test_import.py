"""``import ndistribute`` is cheap: it asks for no optional package and starts nothing."""

import importlib.resources
import json
import re
from pathlib import Path

import ndistribute as nd
from tests.processes import python_says

OPTIONAL = set("cupy grpc jax matplotlib mpi4py scipy sklearn tensorflow torch tqdm".split())

# Asks for every module first, so that a package that is not installed, and whose import the
# package would survive, is seen as well.
_LIST_IMPORTS = """
import json, sys, threading
import numpy

asked = []

class Listener:
    def find_spec(self, name, path=None, target=None):
        asked.append(name)

sys.meta_path.insert(0, Listener())
import ndistribute
print(json.dumps([asked, threading.active_count()]))
"""


def test_import_asks_for_no_optional_package_and_starts_no_thread():
    modules, threads = json.loads(python_says("-c", _LIST_IMPORTS))
    asked = {name.partition(".")[0] for name in modules}
    assert "ndistribute" in asked
    assert asked & OPTIONAL == set()
    assert threads == 1


_LIST_GUESTS = """
import sys
import ndistribute as nd

def loaded():
    return {name for name in sys.modules if name.startswith("ndistribute.")}

guests = "graph", "estimator", "compat"
assert not {name for name in loaded() if name.split(".")[1] in guests}, loaded()
dir(nd)
assert not {name for name in loaded() if name.split(".")[1] in guests}, loaded()
assert nd.device is nd.graph.device
assert nd.estimator.Estimator
"""


def test_import_loads_neither_graphs_nor_estimators_until_they_are_used():
    python_says("-c", _LIST_GUESTS)


def test_the_changelog_tells_of_this_version():
    changelog = (Path(nd.__file__).parents[1] / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[(?P<version>[^\]]+)\]", changelog, re.MULTILINE)
    assert newest["version"] == nd.__version__


def test_the_package_says_that_it_is_typed():
    assert importlib.resources.files(nd).joinpath("py.typed").is_file()
