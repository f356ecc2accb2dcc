"""The version of the package, which processes of a job compare when they meet."""

__version__ = "0.1.0"
