"""TensorFlow, set up once in a worker: the only file that imports it."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

__all__ = ["mirrored", "tensorflow"]

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
