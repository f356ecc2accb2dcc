"""Names of other packages, for scripts that were written for them."""
