"""Reports: text, charts and pages from plain data, without torch.

`findings` is the data, `composition` makes it; nothing here measures or plans.
"""
