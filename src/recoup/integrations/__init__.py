"""Training frameworks: one module each, imported by name and never by `import recoup`.

`recoup.integrations.transformers`, `recoup.integrations.lightning` and
`recoup.integrations.accelerate` need the package of their name.
"""
