"""Optimizers and gradient scalers, as far as torch hides them.

Nothing here trains; the trainer and the engine use it.
"""
