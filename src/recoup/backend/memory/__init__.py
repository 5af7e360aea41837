"""Storages and memory: identity, ledgers, meters, pinned buffers, copy streams.

Counts and copies bytes; other packages decide what to offload.
"""
