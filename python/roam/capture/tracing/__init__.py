"""One run of the user's step on fake tensors: the tracer runs it, the recorder writes down its
calls.
"""
