"""Measurements of recoup beside what else there is; see README.md."""
