"""The manager: `fit` on the user's own step, learned while it runs.

Keeps what it has observed for each kind of step, and its statistics.
"""
