"""The border to torch: private names of torch are used here and nowhere else.

One sub-package for each part of torch that recoup needs. Nothing here decides what
is kept or recomputed.
"""
