"""Pipeline parallelism: a model's layers spread over devices as stages."""
