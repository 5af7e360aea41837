"""Minimum cuts: what to hold at a price of a byte, and what no plan can do without.

Here live the cut of one stretch, the bound over a whole step and the saved sets of a
compiled block. Nothing here knows how a plan is put together.
"""
