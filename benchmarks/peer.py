"""TensorFlow and PyTorch, set up once in a worker: the only file that imports them."""

from __future__ import annotations

import atexit
import datetime
import functools
import os
from types import ModuleType
from typing import Any

__all__ = [
    "mirrored",
    "multi_worker",
    "parameter_server",
    "server",
    "tensorflow",
    "torch_group",
]

# Logical devices are fixed when TensorFlow starts, so a worker has as many as any group needs.
# They share one pool of threads: a single device computes as fast beside idle ones as alone.
LOGICAL_DEVICES = 4


@functools.cache
def tensorflow() -> ModuleType:
    """Return TensorFlow with its threads pinned to this worker's cores."""
    import tensorflow as tf

    cores = len(os.sched_getaffinity(0))
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    tf.config.threading.set_inter_op_parallelism_threads(cores)
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(LOGICAL_DEVICES)]
    tf.config.set_logical_device_configuration(cpu, logical)
    return tf


@functools.cache
def mirrored(replicas: int) -> Any:
    """Return the worker's MirroredStrategy over the first logical CPU devices.

    Only one in a process: a second one gives its collectives the keys of the first one's, and
    TensorFlow then refuses them ("Shape mismatch in the collective instance 100").
    """
    tf = tensorflow()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


@functools.cache
def multi_worker() -> tuple[ModuleType, Any]:
    """Return TensorFlow and a team's MultiWorkerMirroredStrategy, whose processes make a ring."""
    tf = _single_device()
    communication = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=communication, timeout_seconds=60.0
    )
    return tf, tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


@functools.cache
def parameter_server() -> tuple[ModuleType, Any, Any]:
    """Return TensorFlow, and the strategy and coordinator of a chief of parameter servers."""
    tf = _single_device()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return tf, strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


def server(cluster: dict[str, list[str]], job: str, index: int) -> Any:
    """Return a running server of TensorFlow for a task of a cluster."""
    tf = _single_device()
    return tf.distribute.Server(tf.train.ClusterSpec(cluster), job, index, protocol="grpc")


@functools.cache
def torch_group() -> tuple[ModuleType, int]:
    """Return PyTorch and the size of a team, whose processes meet by gloo."""
    import torch
    import torch.distributed

    torch.set_num_threads(_threads())
    size = int(os.environ["BENCHMARK_SIZE"])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['BENCHMARK_DIRECTORY']}/gloo",
        rank=int(os.environ["BENCHMARK_RANK"]),
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    atexit.register(torch.distributed.destroy_process_group)
    return torch, size


def _single_device() -> ModuleType:
    """Return TensorFlow with as many threads as this process has for BLAS."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(_threads())
    tf.config.threading.set_inter_op_parallelism_threads(_threads())
    return tf


def _threads() -> int:
    """Return how many threads each process of a team gets, as many as its BLAS."""
    return int(os.environ["OMP_NUM_THREADS"])
