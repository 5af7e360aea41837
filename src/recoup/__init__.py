"""Make PyTorch training fit in the memory there is."""
from recoup.engine.scope import CheckpointScope as CheckpointScope
from recoup.core.errors import RecoupError as RecoupError
