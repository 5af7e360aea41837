"""The border to torch: private names of torch are used here and nowhere else.

One sub-package for each part of torch that recoup needs. Nothing here decides what
is kept or recomputed.
"""

from recoup.backend import capabilities

for _names in capabilities.NAMES.values():
    capabilities.require(_names)
