"""Planners: from the graph of a step and a budget in bytes to a plan, without torch.

`planner` is the entry, `search` tries cheap planners first; the other modules hold the
algorithms, `baselines` the rules to compare with. Nothing here runs a step.
"""
