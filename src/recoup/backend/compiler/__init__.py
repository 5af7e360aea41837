"""Dynamo, AOTAutograd and Inductor: joint graphs, and partitions of our own.

Graphs leave here as plain data; the choice of a partition comes from a planner.
"""
