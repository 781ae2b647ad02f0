"""The Rust extension module; private, its users are the Python files named in each group."""

from collections.abc import Mapping, Sequence
from typing import Any, final

__version__: str

# selection.py and backends/registry.py: specs are Spec.to_dict(), facts are Facts.to_dict().
@final
class Registry:
    def __new__(cls, specs: Sequence[Mapping[str, Any]]) -> Registry: ...
    def select(
        self, facts: Mapping[str, Any], problem: Mapping[str, Any], backend: str
    ) -> dict[str, Any]: ...
    def check_name(self, backend: str) -> None: ...
    def decisions(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]: ...
