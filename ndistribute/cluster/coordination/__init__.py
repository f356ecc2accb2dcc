"""The chief gives functions to workers, and workers run them."""
