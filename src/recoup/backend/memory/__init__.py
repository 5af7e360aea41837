"""Storages and memory: identity, ledgers, meters, pinned buffers, copy streams.

Counts bytes and moves them; what is worth moving is decided elsewhere.
"""
