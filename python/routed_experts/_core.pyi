"""Types of the Rust module."""

from typing import Any

__all__ = ["__version__", "find_toolkit"]
__version__: str

def find_toolkit() -> dict[str, Any]: ...
