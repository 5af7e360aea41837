"""The border to torch: the only package that uses torch's private names.

One sub-package for each part of torch that recoup needs. Nothing here decides what
is kept or recomputed.
"""

from recoup.backend import capabilities

for _names in capabilities.NAMES.values():
    capabilities.require(_names)
