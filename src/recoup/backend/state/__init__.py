"""State that a step reads or changes: found by `walk`, saved by `snapshots`.

Objects, attributes, buffers and random generators; no autograd here.
"""
