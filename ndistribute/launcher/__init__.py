"""How a job is started on this machine, over ssh or through MPI, watched and ended."""
