"""The step that is measured: what it runs, repeated without leaving a trace.

Real, at the least memory, or dry on tensors without memory.
"""
