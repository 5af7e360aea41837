"""Source rewriting: the loops of an ordinary function become checkpointed loops.

Reads and compiles Python source; `recoup.loops.loop` runs the result.
"""
