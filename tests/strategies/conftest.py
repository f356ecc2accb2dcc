"""Contract tests of strategies run over every kind of them."""

from tests.kinds import several, strategy

__all__ = ["several", "strategy"]
