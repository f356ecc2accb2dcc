"""The parameter servers of a job as a process that uses them sees them."""
