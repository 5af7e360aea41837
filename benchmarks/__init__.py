"""Measurements of recoup versus other tools; see README.md."""
