"""The measured step, which can be repeated without lasting changes.

Runs for real at minimum memory, or dry on fake tensors.
"""
