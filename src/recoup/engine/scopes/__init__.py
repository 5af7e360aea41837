"""What users put around code: scopes, functions, modules, groups, marks.

Thin: each opens a region of `recoup.engine.recording` and reports on it.
"""
