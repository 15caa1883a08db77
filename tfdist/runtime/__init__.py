"""Protocol and utilities that the launcher shares with the processes it starts."""
