"""Several replicas are compared with one, step by step, in processes of their own."""
