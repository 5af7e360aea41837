"""Replay in backward: programs cut from tapes, recalled values, functions rerun.

Backward only; what forward records is in `recoup.engine.recording`.
"""
