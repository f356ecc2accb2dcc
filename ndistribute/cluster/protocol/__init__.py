"""What a client of a parameter server asks, and what it is answered."""
