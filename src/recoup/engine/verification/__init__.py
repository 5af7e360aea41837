"""Verification: a recomputed value has the bits that forward saw.

Fingerprints are compared on the device and read once a backward.
"""
