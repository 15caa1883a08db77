"""Own collectives between the worker processes of a job, on CPUs."""
