"""A run's memory and traffic are predicted for each way to spread it over devices, before any of them is there."""
