"""Benchmarks and sweeps that anyone can run: `roam bench`.

A package beside roam: roam's wheel does not contain it, and nothing of roam but the command imports
it. It uses roam's private modules, so both come from the same commit.
"""
