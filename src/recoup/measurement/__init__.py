"""Measure training steps: their memory, times, operators and gradients.

Observes and returns data; nothing here plans or chooses.
"""
