"""What the launcher and the processes it starts share: variables, files, exit codes, signals, limits."""
