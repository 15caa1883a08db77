"""Training runs: train, evaluate and save one model as its configuration says."""
