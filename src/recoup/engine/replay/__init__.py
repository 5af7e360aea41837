"""Replay in backward: programs cut from tapes, the replay cache, function reruns.

Backward only; recording in forward is in `recoup.engine.recording`.
"""
