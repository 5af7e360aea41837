"""Checkpointed loops over NumPy arrays, with HIPS autograd.

Mirrors `torch` and `jax`; shared code is one level up.
"""
