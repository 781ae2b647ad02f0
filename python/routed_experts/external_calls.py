"""What calls of other projects' kernels share: refusals right before a launch, and facts of the device at hand."""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from routed_experts.combine import wants_grad
from routed_experts.errors import DeviceError, GradientUnsupported

_LOCK = threading.Lock()
_BOUND: dict[str, torch.device] = {}


def refuse_gradient(backend: str, *tensors: Tensor | None) -> None:
    """Refuse a call whose gradient is wanted: the kernel would cut it out of the graph in silence.

    Raises:
        GradientUnsupported: grad mode is on and one of the tensors requires a gradient.
    """
    if wants_grad(*tensors):
        raise GradientUnsupported(
            f"{backend} has no backward",
            found="hidden states, routing weights or experts that require a gradient",
            needed="a call without gradients",
            hint='call under torch.no_grad(), or use backend="auto" to train',
        )


def bind_device(backend: str, device: torch.device) -> None:
    """Refuse a second CUDA device in one process: compiled functions belong to the context that loaded them.

    Raises:
        DeviceError: the kernels have run on another device before.
    """
    if device.type != "cuda":
        return
    with _LOCK:
        first = _BOUND.setdefault(backend, device)
    if first != device:
        raise DeviceError(
            f"{backend} is bound to one device in each process: on another it computes garbage without an error",
            found=f"{device}, after {first}",
            needed=f"all experts of this process on {first}",
            hint='run one process for each device, or use backend="auto"',
        )


@functools.lru_cache(maxsize=16)
def capability_major(device: torch.device) -> int:
    """Return the major number of a device's compute capability: of the tensor's device, not of the current one."""
    return torch.cuda.get_device_capability(device)[0]
