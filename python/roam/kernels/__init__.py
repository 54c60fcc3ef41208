"""Kernels: which of them can write where a plan says, as tests found.

table (what was cleared) <- trial (how it is tried), substitutes (equal kernels) -> calls (what it
means for a program)
"""
