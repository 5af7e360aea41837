"""Record regions in forward and replay them in backward; scopes, plans and tiers."""
