"""A chief gives functions to workers, and gets their results: `ClusterCoordinator`."""
