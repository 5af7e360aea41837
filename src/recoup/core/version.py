"""The version of recoup, as `pyproject.toml` has it."""

VERSION = "0.1.0"
