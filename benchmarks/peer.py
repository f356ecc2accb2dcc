"""TensorFlow, PyTorch and Keras on JAX, set up once in each process; no other file imports them."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import json
import os
from types import ModuleType
from typing import Any

from benchmarks.worker import task


@functools.cache
def tensorflow() -> ModuleType:
    """Return TensorFlow with as many threads as this process has for BLAS."""
    with contextlib.suppress(KeyError, OSError):  # It listens itself, at the address in TF_CONFIG.
        os.close(int(os.environ.pop("NDISTRIBUTE_LISTEN_FD")))
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(_threads())
    tf.config.threading.set_inter_op_parallelism_threads(_threads())
    return tf


@functools.cache
def keras_on_jax() -> ModuleType:
    """Return Keras with its backend JAX."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    return keras


@functools.cache
def mirrored(replicas: int) -> Any:
    """Return the process's MirroredStrategy over logical CPU devices.

    Only one in a process: a second one gives its collectives the keys of the first one's, and
    TensorFlow then refuses them ("Shape mismatch in the collective instance 100").
    """
    os.environ.pop("TF_CONFIG", None)
    tf = tensorflow()
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    tf.config.set_logical_device_configuration(cpu, logical)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


@functools.cache
def multi_worker() -> Any:
    """Return the MultiWorkerMirroredStrategy of a group, whose processes make a ring."""
    tf = tensorflow()
    communication = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=communication, timeout_seconds=60.0
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


@functools.cache
def parameter_server() -> tuple[Any, Any]:
    """Return the strategy and coordinator of a chief of parameter servers."""
    tf = tensorflow()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


@functools.cache
def server() -> Any:
    """Be a server of TensorFlow from now on."""
    tf = tensorflow()
    cluster = tf.train.ClusterSpec(json.loads(os.environ["TF_CONFIG"])["cluster"])
    return tf.distribute.Server(cluster, *task(), protocol="grpc")


@functools.cache
def torch_group() -> tuple[ModuleType, int]:
    """Return PyTorch and this process's rank in a group that meets by gloo."""
    import torch
    import torch.distributed

    torch.set_num_threads(_threads())
    rank, size = int(os.environ["RANKS_RANK"]), int(os.environ["RANKS_SIZE"])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.path.dirname(os.environ['RANKS_DOOR'])}/gloo",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    atexit.register(torch.distributed.destroy_process_group)
    return torch, rank


def _threads() -> int:
    return int(os.environ["OMP_NUM_THREADS"])
