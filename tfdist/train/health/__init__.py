"""Signs of life, bounds on waiting, and preemption."""
