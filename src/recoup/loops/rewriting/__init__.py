"""Source rewriting: the loops of an ordinary function become checkpointed loops."""
