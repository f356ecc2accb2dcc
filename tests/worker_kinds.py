"""The former place of what `tests/kinds.py` has, for those who still import it from here."""

from tests.kinds import inside_worker

__all__ = ["inside_worker"]
