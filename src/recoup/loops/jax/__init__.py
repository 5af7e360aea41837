"""Checkpointed loops over JAX arrays: a schedule as a table in one program.

Mirrors `torch` and `numpy`; what the three share is one level up.
"""
