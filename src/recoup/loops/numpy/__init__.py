"""Checkpointed loops over NumPy arrays, with HIPS autograd.

Mirrors `torch` and `jax`; what the three share is one level up.
"""
