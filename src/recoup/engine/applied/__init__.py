"""Plans applied to models: hooks that open and close the regions of a plan.

The plan itself is data of `recoup.core`; compiled blocks are run here too.
"""
