"""Linear programmes: one option for each given stretch, as fast as a budget allows.

Here live the programme, its rounding to whole options and the calls of HiGHS. Where
forward is cut is decided elsewhere.
"""
