"""Observe training steps: what they keep, how long they take, what they compute."""
