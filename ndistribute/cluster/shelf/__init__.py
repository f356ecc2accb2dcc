"""Variables in memory that a server shares with the processes of its host."""
