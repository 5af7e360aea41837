"""Operators: what they write, draw and repeat; how they are called and timed.

Facts about one operator call; which calls are recorded is decided in the engine.
"""
