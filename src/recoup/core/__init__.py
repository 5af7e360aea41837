"""The vocabulary of recoup: plans, graphs, segments, units, the footprint of a plan.

Plain data and functions of it: standard library and NumPy only, no torch.
"""
