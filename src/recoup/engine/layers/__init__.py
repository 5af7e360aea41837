"""The layer checkpointer: an activation kept every few layers of a stack.

The names of kizzasi's document; `recoup.engine.replay` recomputes the layers.
"""
