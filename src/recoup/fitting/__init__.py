"""Whole workflows: measure a model, plan for a budget, apply and check the plan.

`fit`, `frontier` and the manager, each with its driver.
"""
