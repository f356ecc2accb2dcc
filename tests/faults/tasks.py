"""The former place of what `tests/processes.py` has, for those who still import it from here."""

from tests.processes import ROOT, Tasks, free_addresses, wait_until

__all__ = ["ROOT", "Tasks", "free_addresses", "wait_until"]
