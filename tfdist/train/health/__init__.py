"""Training health: heartbeats, a watchdog over collectives, and preemption."""
