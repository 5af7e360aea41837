"""Checkpointed loops over JAX arrays: a schedule as a table in one program.

Mirrors `torch` and `numpy`; shared code is one level up.
"""
