"""Models of every common kind, small for tests and large for the accelerator."""
