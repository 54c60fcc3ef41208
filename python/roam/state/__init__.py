"""The Python state that a step reads and changes: found, kept, guarded and put back. Knows nothing
of programs and plans.

discovery (what the step can get at, as `spaces`) -> references (where tensors live) -> snapshot,
guards
"""
