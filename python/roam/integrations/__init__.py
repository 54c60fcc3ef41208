"""Trainers of libraries, whose own step is compiled: one module for each library, which is imported
only when that module is.
"""
