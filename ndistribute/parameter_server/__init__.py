"""Variables that live on servers: what a server holds, what is asked of it, and who asks."""
