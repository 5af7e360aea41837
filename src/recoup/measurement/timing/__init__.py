"""Time a step, a block or an operator; predict times and calibrate predictions.

Bytes are measured in `recoup.measurement.tracing`.
"""
