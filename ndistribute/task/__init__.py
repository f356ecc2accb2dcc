"""A task of a cluster as a listening process, and what its services share."""
