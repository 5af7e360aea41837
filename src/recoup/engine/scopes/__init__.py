"""The user interface of regions: scopes, functions, modules, groups, marks.

Thin: each opens a region of `recoup.engine.recording` and reports on it.
"""
