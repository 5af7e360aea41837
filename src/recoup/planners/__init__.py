"""Planners: from the graph of a step and a budget in bytes to a plan, without torch.

`planner` is the entry, `search` tries cheap planners first; `cut`, `dp` and `lp` hold
the algorithms, `baselines` the rules to compare with. Nothing here runs a step.
"""
