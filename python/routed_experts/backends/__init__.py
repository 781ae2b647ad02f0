"""Backends, one file each."""
