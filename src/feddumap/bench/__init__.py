"""Benchmarks: seconds per round, overhead, scaling and the cost of Flower on this machine."""
