"""PyTorch's modules on workers that are processes: all train as one process does, also while
workers are killed and join, and with the bits of `DistributedDataParallel`."""

import os
import signal

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import DEADLINE, context
from tests.processes import Ranks, Tasks

torch = pytest.importorskip("torch")

from ndistribute.interop import torch as guest  # noqa: E402
from tests.interop.networks import (  # noqa: E402
    OPTIMIZERS,
    ROWS,
    STEPS,
    alone,
    check_equal,
    data,
    loss_of,
    pair,
    plain_step,
    rows,
    trained,
    values_of,
)

OPTIONS = nd.CommunicationOptions(timeout_seconds=DEADLINE)


def joined(**options):
    return nd.MultiWorkerMirroredStrategy(communication_options=OPTIONS, **options)


def in_steps(rank, size, optimizer):
    """Train in `strategy.run` on all workers."""
    (values,) = trained(joined(), pair(optimizer))
    return values


def as_a_script(rank, size, optimizer):
    """Train outside of `strategy.run`, as a script of Horovod or DDP does."""
    with joined() as strategy, strategy.scope():
        torch.manual_seed(rank)
        model, distributed = pair(optimizer)()
        guest.broadcast(model, distributed)
        for _ in range(STEPS):
            distributed.zero_grad()
            loss_of(model, rows(rank, size)).backward()
            distributed.step()
        return values_of(model)


def beside_ddp(rank, size, folder):
    """Return the parameters in float32 that we and `DistributedDataParallel` reach."""
    store = f"file://{folder}/store-{size}"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=size)
    try:
        reached = []
        with joined() as strategy, strategy.scope():
            for ours in (True, False):
                torch.manual_seed(1)
                layers = torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10)
                model = torch.nn.Sequential(*layers)
                optimizer = torch.optim.Adam(model.parameters(), 0.003)
                if ours:
                    called = model
                    guest.DistributedOptimizer(optimizer)
                else:
                    called = torch.nn.parallel.DistributedDataParallel(model)
                for step in range(10):
                    rng = torch.Generator().manual_seed(size * step + rank)
                    inputs = torch.randn(16, 64, generator=rng)
                    optimizer.zero_grad()
                    called(inputs).square().mean().backward()
                    optimizer.step()
                reached.append(values_of(model))
        return reached
    finally:
        torch.distributed.destroy_process_group()


def with_a_killed_worker(rank, size):
    """Train until worker 1 is killed in its backward pass; return what the others raise."""

    class Fatal(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return gradient

    with joined() as strategy, strategy.scope():
        model, distributed = pair()()
        guest.broadcast(model, distributed)
        with pytest.raises(nd.WorkerLostError) as caught:
            Fatal.apply(loss_of(model, rows(rank, size))).backward()
        return str(caught.value)


@pytest.fixture(scope="module", params=[2, 3])
def workers(request):
    with Ranks(request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("program", [in_steps, as_a_script])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_workers_train_as_one_process_does(workers, program, optimizer):
    check_equal(workers.results(program, optimizer), alone(pair(optimizer)))


def test_parameters_have_the_bits_of_ddp(workers, tmp_path):
    for ours, theirs in workers.results(beside_ddp, str(tmp_path)):
        for mine, other in zip(ours, theirs, strict=True):
            if workers.size == 2:
                assert np.array_equal(mine, other)
            else:  # Its ring adds each part in another order.
                np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_a_killed_worker_is_named_on_all_others():
    with Ranks(3) as ranks:
        outcomes = ranks.run(with_a_killed_worker)
    assert outcomes[1].error == "Lost"
    for rank in (0, 2):
        assert "worker 1" in outcomes[rank].result()


# Elastic workers.


def dataset(repeats):
    inputs, targets = data()
    return (
        nd.Dataset.from_tensor_slices((inputs.numpy(), targets.numpy())).batch(ROWS).repeat(repeats)
    )


def elastic_step(dies):
    """Return a step in which a worker may die at a point."""

    def step(model, optimizer, inputs, targets):
        dies("forward")
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.tensor(inputs)), torch.tensor(targets)).backward()
        dies("update")
        optimizer.step()
        dies("end")

    return step


def until_one_dies(rank, size, optimizer, point):
    """Train until worker 1 dies at a point of the third step, and the others complete it."""
    with joined(elastic=nd.Elastic(min_workers=2)) as strategy, strategy.scope():
        torch.manual_seed(rank)
        replicas = guest.replicate(pair(optimizer))
        steps = 0

        def dies(here):
            if (rank, steps, point) == (1, 2, here):
                os.kill(os.getpid(), signal.SIGKILL)

        for batch in strategy.elastic(dataset(5)):
            strategy.run(elastic_step(dies), args=(*replicas, *batch))
            steps += 1
        assert strategy.num_replicas_in_sync == 2
        return values_of(replicas[0].values[0])


@pytest.mark.parametrize("point", ["forward", "update", "end"])
def test_the_others_take_half_a_step_back_and_run_it_again(point):
    with Ranks(3) as ranks:
        outcomes = ranks.run(until_one_dies, "adam", point)
    assert outcomes[1].error == "Lost"
    with nd.OneDeviceStrategy("cpu:0") as strategy, strategy.scope():
        torch.manual_seed(0)
        replicas = guest.replicate(pair("adam"))
        for _ in range(5):
            strategy.run(plain_step, args=replicas)
        right = values_of(replicas[0].values[0])
    check_equal([outcomes[rank].result() for rank in (0, 2)], right)


def a_script_until_one_dies(rank, size):
    """Train outside of `run`; worker 1 dies in its third backward pass, and the others go on."""
    with joined(elastic=nd.Elastic(min_workers=2)) as strategy, strategy.scope():
        torch.manual_seed(rank)
        model, optimizer = pair()()
        guest.broadcast(model, optimizer)
        for number, (inputs, targets) in enumerate(strategy.elastic(dataset(6))):
            x, y = (torch.tensor(part.numpy()) for part in (inputs, targets))
            optimizer.zero_grad()
            if (rank, number) == (1, 2):
                model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return number, strategy.num_replicas_in_sync, values_of(model)


def test_a_script_goes_on_without_a_killed_worker():
    with Ranks(3) as ranks:
        outcomes = ranks.run(a_script_until_one_dies)
    assert outcomes[1].error == "Lost"
    (steps, size, values), (*same, others) = (outcomes[rank].result() for rank in (0, 2))
    assert [steps, size] == same == [5, 2]
    check_equal([values, others], values, 0)


def leaves_and_joins(rank, size):
    """Train; worker 2 leaves after three steps, and joins again with a model of its own."""
    leaves, steps, after = rank == 2, 0, 0

    def step(*args):
        elastic_step(lambda _: None)(*args)
        return context().all_reduce("sum", float(rank == 2 and not leaves))

    while True:
        try:
            with joined(elastic=nd.Elastic(min_workers=2)) as strategy, strategy.scope():
                torch.manual_seed(rank + leaves)
                model, optimizer = guest.replicate(pair("adam"))
                for batch in strategy.elastic(dataset(None)):
                    (is_back,) = strategy.run(step, args=(model, optimizer, *batch)).values
                    after, steps = after + is_back, steps + 1
                    if after == 3:
                        break
                    if leaves and steps == 3:
                        leaves = False
                        signal.raise_signal(signal.SIGTERM)
                count = optimizer.values[0].state_dict()["state"][0]["step"].item()
                return count, values_of(model.values[0])
        except SystemExit:
            continue


def test_a_worker_that_joins_gets_parameters_and_the_state_of_the_optimizer():
    with Ranks(3) as ranks:
        counts, values = zip(*ranks.results(leaves_and_joins), strict=True)
    assert len(set(counts)) == 1
    check_equal(values, values[0], 0)


# Parameter servers.


@pytest.fixture
def served(monkeypatch):
    """The strategy of a worker whose server is another process."""
    with Tasks(workers=1, servers=1, chief=False) as tasks:
        monkeypatch.setenv("NDISTRIBUTE_SECRET", tasks.environ["NDISTRIBUTE_SECRET"])
        tasks.start_all("ps")
        resolver = tasks.resolver("worker")
        yield nd.ParameterServerStrategy(resolver, devices=["cpu:0"], timeout_seconds=DEADLINE)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_on_a_server_are_those_of_one_process(served, optimizer):
    check_equal(trained(served, pair(optimizer)), alone(pair(optimizer)))


def together_on_a_server(rank, size):
    """Serve, or train as one of two workers whose steps are combined into one."""
    resolver = nd.TFConfigClusterResolver()
    if resolver.task_type == "ps":
        return nd.Server(resolver.cluster_spec(), "ps", 0).join()
    strategy = nd.ParameterServerStrategy(
        resolver, devices=["cpu:0"], replicas_to_aggregate=2, timeout_seconds=DEADLINE
    )

    def step(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, rows(rank - 1, 2)).backward()
        optimizer.step()

    with strategy, strategy.scope():
        torch.manual_seed(0)
        replicas = guest.replicate(pair())
        for _ in range(STEPS):
            strategy.run(step, args=replicas)
        return values_of(replicas[0].values[0])


def test_steps_of_workers_that_wait_for_each_other_are_averaged():
    with Ranks(3, jobs=["ps", "worker", "worker"]) as ranks:
        outcomes = ranks.run(together_on_a_server)
    check_equal([outcomes[rank].result() for rank in (1, 2)], alone())
