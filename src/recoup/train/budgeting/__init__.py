"""The trainer's memory: regions around blocks, budgets, recovery from out of memory.

Plans come from `recoup.fitting`; several processes agree on one here.
"""
