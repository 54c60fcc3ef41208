"""Captures for CUDA on a machine that has none, as an estimate."""
