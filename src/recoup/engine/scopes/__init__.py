"""Regions as users write them: scopes, functions, modules, groups, marks.

Thin: each opens a region of `recoup.engine.recording` and reports on it.
"""
