"""Engines: start tasks on machines that ssh, Slurm, Ray or Kubernetes give to a launch."""
