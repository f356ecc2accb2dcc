"""Contract tests of optimizers run over every kind that updates variables in its own way."""

from tests.kinds import ALL, SEVERAL, fixture_over

strategy = fixture_over(ALL, "mirrored-2", "central-3")
several = fixture_over(SEVERAL, "mirrored-2", "central-3")
