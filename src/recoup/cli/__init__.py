"""The command line: the only part of recoup that prints."""
