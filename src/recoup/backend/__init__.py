"""The torch border: private torch interfaces are touched here and nowhere else."""
