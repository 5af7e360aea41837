"""Planners: from the graph of a step and a budget in bytes to segments. No torch."""
