"""What goes wrong between ranks."""

from __future__ import annotations

from routed_experts.errors import DeviceError


class RankError(DeviceError):
    """A rank that did not answer in time, is gone, or refused its own part of a call. The group is of no more use."""
