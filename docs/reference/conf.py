"""How `make docs` builds the API reference from the docstrings of the package."""

import ndistribute

project = "ndistribute"
author = "The ndistribute authors"
release = ndistribute.__version__
html_title = f"ndistribute {release}: API reference"
html_theme = "alabaster"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "inherited-members": True}
default_role = "code"  # The docstrings write code in single backticks, as Markdown does.
nitpicky = False
