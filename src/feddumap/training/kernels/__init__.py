"""Kernels in C for plain chains of layers on a CPU: the same results as torch's but for rounding, several
times faster.

Behind a 2×2 max-pool and a ReLU few outputs have a gradient, which no framework makes use of; see sparse.c.
"""
