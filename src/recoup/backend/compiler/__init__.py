"""Dynamo, AOTAutograd and Inductor: joint graphs and custom partitions.

Returns graphs as plain data; a planner chooses the partition.
"""
