"""Contract tests of variables run over every kind that keeps them in its own way."""

import ndistribute as nd
from tests.kinds import ALL_MEMORIES, COMPILED_2, SEVERAL_MEMORIES, fixture_over, inside_worker
from tests.strategies.on_servers import holders, worker_of


def sharded():
    """Two replicas, whose variables are in three shards on two servers of this process."""
    with holders(2) as held:
        partitioner = nd.partitioners.FixedShardsPartitioner(3)
        return worker_of(held, replicas=2, variable_partitioner=partitioner)


SHARDED = {} if inside_worker() else {"sharded-2": sharded}
strategy = fixture_over({**ALL_MEMORIES, **SHARDED, **COMPILED_2}, "mirrored-2")
several = fixture_over({**SEVERAL_MEMORIES, **SHARDED, **COMPILED_2}, "mirrored-2")
