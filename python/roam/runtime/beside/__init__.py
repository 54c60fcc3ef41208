"""Runs a step's Python beside its plan: the user's function runs at each call, its operators are
compared with a recording, and their kernels run by the plan.
"""
