"""The trainer: a loop that uses everything here and survives what stops others."""
