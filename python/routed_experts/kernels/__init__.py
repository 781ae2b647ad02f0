"""Triton kernels. Nothing here is imported before it is run: Triton is an optional package."""
