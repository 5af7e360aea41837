"""Measure training steps: what they keep, how long they take, what they compute.

Observes and returns data; nothing here plans or chooses.
"""
