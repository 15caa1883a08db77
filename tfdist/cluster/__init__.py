"""Cluster specs, cluster resolvers and preflight checks that run before TensorFlow starts."""
