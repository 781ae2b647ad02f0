"""The run function of rows whose requirements are known and whose code is not here yet."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import BackendUnavailable


def refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse to run.

    Selection never accepts such a row; this guards a caller that takes a run function out of the table.
    """
    raise BackendUnavailable(
        "this backend is not in this version",
        found="a row without code",
        needed="a later version of routed-experts",
        hint='use backend="auto"',
    )
