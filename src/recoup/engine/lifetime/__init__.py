"""Values of a region: where each is kept, what overwrites it, when it is freed.

`Value` and `Hold` are changed here; the other packages ask them.
"""
