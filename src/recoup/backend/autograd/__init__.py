"""Autograd and its surroundings: saved-tensor hooks, modes, autocast, wrappers.

Reads and changes what torch keeps for each thread; holds no region of its own.
"""
