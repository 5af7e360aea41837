"""The layer checkpointer: an activation kept every few layers of a stack.

Its document's names; the layers run again through `recoup.engine.replay`.
"""
