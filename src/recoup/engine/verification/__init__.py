"""Verification: compare the bits of recomputed values with forward's.

Fingerprints are compared on the device and read once per backward.
"""
