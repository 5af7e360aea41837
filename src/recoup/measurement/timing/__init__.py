"""Time a step, a block or an operator; correct and predict times.

Seconds only; bytes are in `recoup.measurement.tracing`.
"""
