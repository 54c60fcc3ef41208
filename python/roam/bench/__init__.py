"""Benchmarks and sweeps that anyone can run: `roam bench`."""
