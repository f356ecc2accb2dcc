"""How bytes move between replicas."""
