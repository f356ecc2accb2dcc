"""Contract tests of variables run over every kind that keeps them in its own way."""

from tests.kinds import ALL, SEVERAL, fixture_over

strategy = fixture_over(ALL, "mirrored-2")
several = fixture_over(SEVERAL, "mirrored-2")
