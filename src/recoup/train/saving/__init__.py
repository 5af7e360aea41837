"""Snapshots of a run: one file of plain data, written atomically.

State is collected and restored here; the trainer decides when to save.
"""
