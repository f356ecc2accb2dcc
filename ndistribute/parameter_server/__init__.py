"""Parameter servers: their state, the requests to them, and their clients."""
