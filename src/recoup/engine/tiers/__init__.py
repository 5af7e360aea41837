"""Tiers: where the values live that a region keeps."""
