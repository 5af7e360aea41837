"""Show: text, charts and pages, made of plain data and without torch."""
