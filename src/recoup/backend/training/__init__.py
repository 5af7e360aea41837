"""Access to torch's internals of optimizers and gradient scalers.

Nothing here trains; the trainer and the engine use it.
"""
