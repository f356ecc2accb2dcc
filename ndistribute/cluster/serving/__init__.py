"""A server as a process: how it starts, keeps its variables, and ends."""
