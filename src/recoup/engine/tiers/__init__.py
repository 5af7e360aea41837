"""Tiers: places for the values that a region keeps."""
