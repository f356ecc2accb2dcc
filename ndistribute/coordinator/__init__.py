"""`ClusterCoordinator`: a chief schedules functions on workers and gets their results."""
