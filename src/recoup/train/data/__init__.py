"""Batches: counted, moved, split; reduction of losses; the position in the data."""
