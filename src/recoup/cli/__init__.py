"""The command line: the only part of recoup that prints.

Imports torch only when a command needs it. Exit statuses are in `statuses`.
"""
