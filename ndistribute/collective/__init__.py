"""Collectives: how replicas exchange and reduce arrays."""
