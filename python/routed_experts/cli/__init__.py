"""The command line ``routed-experts``."""
