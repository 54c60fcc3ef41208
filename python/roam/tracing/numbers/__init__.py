"""What Python learns of a step's values: numbers, conditions, branches, shapes, random
numbers.
"""
