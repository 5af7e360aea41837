"""Autograd and its context: saved-tensor hooks, modes, autocast, wrapper subclasses.

Reads and changes torch's thread-local state; owns no region.
"""
