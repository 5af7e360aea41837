"""Trace a step: its operators, storages and saved tensors, as a graph.

Produces `recoup.core.graph` from observations of a running step.
"""
