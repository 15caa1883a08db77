"""Command `tfdist verify`: step-by-step numerical comparison of several replicas with one."""
