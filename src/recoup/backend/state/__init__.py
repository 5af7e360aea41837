"""State that a step reads or changes: found by one walk, kept by one snapshot.

Objects, attributes, buffers and random generators; no autograd here.
"""
