"""Trace a step: its operators, storages and saved tensors, as a graph.

From what an observer sees to `recoup.core.graph`.
"""
