"""The layer checkpointer, which keeps an activation every few layers of a stack.

Uses the names of kizzasi's document; `recoup.engine.replay` recomputes the layers.
"""
