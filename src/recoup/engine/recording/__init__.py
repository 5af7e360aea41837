"""Record a region: open regions, recorded operators, values to keep.

Forward only; replaying in backward is in `recoup.engine.replay`.
"""
