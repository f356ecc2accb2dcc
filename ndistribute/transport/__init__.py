"""How the processes of a job reach each other, and know that they belong together."""
