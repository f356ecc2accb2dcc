"""A plugin for pytest that adds what CONTRIBUTING.md shows how to add: ``-p tests.contributed``."""

from tests.test_docs import ROOT, run_blocks

run_blocks((ROOT / "CONTRIBUTING.md").read_text(), "CONTRIBUTING.md")
