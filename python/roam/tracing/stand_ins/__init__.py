"""What stands in the places of the user's objects and of functions while a step is traced, or
refuses there.
"""
