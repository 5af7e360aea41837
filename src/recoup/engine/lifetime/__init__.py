"""Values of a region: their tiers, overwrites and lifetimes.

Only this package changes the state of values and holds.
"""
