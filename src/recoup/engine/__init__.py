"""Record regions in forward and replay them in backward; scopes, plans and tiers.

Carries out a plan or a policy; chooses none.
"""
