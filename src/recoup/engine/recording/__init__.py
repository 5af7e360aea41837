"""Record a region: which are open, what each operator did, what must be kept.

Forward only; what backward asks for is in `recoup.engine.replay`.
"""
