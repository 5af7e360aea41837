"""Differentiable loops over torch, NumPy and JAX, and the source rewriting to them."""
