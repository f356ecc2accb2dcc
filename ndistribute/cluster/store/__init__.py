"""What a parameter server holds and does, as a machine without sockets, threads or clocks."""

from ndistribute.cluster.store.answer import Answer
from ndistribute.cluster.store.limits import Limits
from ndistribute.cluster.store.store import Store

__all__ = ["Answer", "Limits", "Store"]
