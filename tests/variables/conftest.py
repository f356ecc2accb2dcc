"""Contract tests of variables run over every kind that keeps them in its own way."""

from tests.kinds import ALL_MEMORIES, SEVERAL_MEMORIES, fixture_over

strategy = fixture_over(ALL_MEMORIES, "mirrored-2")
several = fixture_over(SEVERAL_MEMORIES, "mirrored-2")
