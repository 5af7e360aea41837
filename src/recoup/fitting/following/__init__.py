"""An applied plan in a training loop: other shapes, other calls, kept memory.

Adapts the plan or warns with the bytes that the loop needs.
"""
