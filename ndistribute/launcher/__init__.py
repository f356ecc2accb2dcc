"""Starts the processes of a job on this machine, over ssh or through MPI, and ends them."""
