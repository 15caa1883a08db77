"""Pipeline parallelism: the layers of a model run on several devices as stages."""
