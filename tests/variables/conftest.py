"""Contract tests of variables run over every kind that keeps them in its own way."""

from tests.kinds import ALL_MEMORIES, COMPILED_2, SEVERAL_MEMORIES, fixture_over
from tests.strategies.on_servers import SHARDED

strategy = fixture_over({**ALL_MEMORIES, **SHARDED, **COMPILED_2}, "mirrored-2")
several = fixture_over({**SEVERAL_MEMORIES, **SHARDED, **COMPILED_2}, "mirrored-2")
