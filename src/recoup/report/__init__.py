"""Reports: text, charts and pages from plain data, without torch."""
