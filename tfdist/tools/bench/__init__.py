"""Command `tfdist bench`: throughput and scaling efficiency of distribution strategies.

It compares the examples per second of several numbers of replicas, and says where the remaining
time goes.
"""
