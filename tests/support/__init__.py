"""What the tests share: twins, and PyTorch's own databases as the judge."""
