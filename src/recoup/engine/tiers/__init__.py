"""Tiers: places for the values that a region keeps.

`protocol` defines a tier, most other modules hold one each; `deposits`, `shelf` and
`traffic` are what tiers share: stored values, files and copies in the background.
"""
