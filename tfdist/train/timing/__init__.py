"""Step breakdown: where the time of a training step goes."""
