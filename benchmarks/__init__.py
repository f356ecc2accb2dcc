"""Benchmarks of ndistribute and of its peers, which do the same work in the same run."""
