"""Commands to be typed: the only part of recoup that prints."""
