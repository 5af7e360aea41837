"""The trainer's memory: regions around blocks, budgets, recovery from too little.

Plans come from `recoup.fitting`; several processes agree on one here.
"""
