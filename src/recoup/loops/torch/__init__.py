"""Checkpointed loops over torch tensors.

Mirrors `numpy` and `jax`; what the three share is one level up.
"""
