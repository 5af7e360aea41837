"""Batches: counted, moved, split into parts, and where in the data a run is.

How the losses of parts make the loss of the whole.
"""
