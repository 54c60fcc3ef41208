"""Operators, their arguments and results, as a program's calls over slots."""
