"""The manager: plans the user's own step while the training loop runs.

Stores observations for each kind of step, and statistics.
"""
