"""Plans applied to models: hooks that open and close the regions of a plan.

The plan itself is data in `recoup.core`. Also runs compiled blocks.
"""
