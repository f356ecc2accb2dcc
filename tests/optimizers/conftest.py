"""Contract tests of optimizers run over every strategy."""

from tests.kinds import several, strategy

__all__ = ["several", "strategy"]
