"""Snapshots of a run: one file of plain data, written whole or not at all.

Collects and restores state; when to save is the trainer's decision.
"""
