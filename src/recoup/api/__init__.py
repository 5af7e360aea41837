"""Whole workflows: measure a model, plan for a budget, apply and check the plan."""
