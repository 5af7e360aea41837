"""Dynamic programmes: where to cut forward into stretches, and how each of them runs.

Here live the places, the options of a stretch, the paths over them and the least peak.
Nothing here solves a linear programme.
"""
