"""Checkpointed loops over torch tensors.

Mirrors `numpy` and `jax`; shared code is one level up.
"""
