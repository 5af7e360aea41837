"""Operators: their writes, randomness, reproducibility, fast calls and timing.

Facts about one operator call; the engine decides which calls are recorded.
"""
