"""The program that capture records, what is done to it, and the planner's graph of it.

ir (calls over numbered values) -> passes, gradient_lifetime, early_checks (rewrite it) -> lower
(graph)
"""
