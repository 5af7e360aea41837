"""Number formats: autocast, loss scaling, and where values leave their range."""
