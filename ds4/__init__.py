"""ds4-server: front ends and the contract they share with the worker."""

__version__ = "0.1.0"
