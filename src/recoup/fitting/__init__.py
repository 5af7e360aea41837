"""Whole workflows: measure a model, plan for a budget, apply the plan, check it.

`fit`, `frontier` and the manager; below them, one driver for each.
"""
