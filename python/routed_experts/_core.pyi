"""Types of the Rust module."""

from typing import Any

__all__: list[str]
__version__: str

def find_toolkit() -> dict[str, Any]: ...
