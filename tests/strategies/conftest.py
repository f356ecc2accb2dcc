"""Contract tests of strategies run over every kind whose replicas meet or run in its own way.

Two mirrored replicas and central ones do as three mirrored do; equivalence and variables have them.
"""

from tests.kinds import ALL_MEMORIES, COMPILED_2, SEVERAL_MEMORIES, fixture_over

strategy = fixture_over({**ALL_MEMORIES, **COMPILED_2}, "mirrored-2", "central-3")
several = fixture_over({**SEVERAL_MEMORIES, **COMPILED_2}, "mirrored-2", "central-3")
