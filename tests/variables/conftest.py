"""Contract tests of variables run over every kind that keeps them in its own way."""

from tests.kinds import ALL_MEMORIES, SEVERAL_MEMORIES, fixture_over
from tests.strategies.on_servers import SHARDED

strategy = fixture_over({**ALL_MEMORIES, **SHARDED}, "mirrored-2")
several = fixture_over({**SEVERAL_MEMORIES, **SHARDED}, "mirrored-2")
