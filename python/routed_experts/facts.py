"""What the machine is: the only place that asks torch, the device and installed packages.

Nothing here starts a CUDA context. Before torch has one, the driver's own tool is asked about the devices.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import shutil
import sysconfig
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import torch

from routed_experts.driver import forget_gpus, visible_gpus
from routed_experts.errors import DeviceError, LayoutError

PACKAGES = (
    "triton",
    "kernels",
    "transformers",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "deep_gemm",
    "sonicmoe",
)
DEFAULT_BYTES = 1 << 30
_MOST_BYTES = (1 << 63) - 1
BATCHED_BYTES = "ROUTED_EXPERTS_BATCHED_BYTES"
CHECKED = "ROUTED_EXPERTS_CHECKED"
RECOMPUTE = "ROUTED_EXPERTS_FUSED_RECOMPUTE"
MAIN_GRAD = "ROUTED_EXPERTS_MAIN_GRAD"
# What decides where kernels of other projects come from.
_KERNEL_VARIABLES = (
    "LOCAL_KERNELS",
    "ROUTED_EXPERTS_PREFER_INSTALLED",
    "ROUTED_EXPERTS_KERNEL_REVISIONS",
    "USE_HUB_KERNELS",
    "HF_HUB_OFFLINE",
)
_MACHINE_VARIABLES = (
    *("CUDA_HOME", "CUDA_PATH", "PATH", "DG_JIT_NVCC_COMPILER", "CUDA_VISIBLE_DEVICES", "CC"),
    *_KERNEL_VARIABLES,
)

# Every call of a layer reads these. The dict inside os.environ answers ten times faster than os.environ does,
# which decodes each value; where an interpreter has no such dict, the slow way is the same.
_ENVIRON: Any = getattr(os.environ, "_data", os.environ)
_encode = os.environ.encodekey if _ENVIRON is not os.environ else str
_SWITCHES = (CHECKED, RECOMPUTE, MAIN_GRAD)
_CHECKED, _RECOMPUTE, _MAIN_GRAD, _BUDGET, *_MACHINE = map(_encode, (*_SWITCHES, BATCHED_BYTES, *_MACHINE_VARIABLES))
_OFF = (None, _encode(""), _encode("0"))


class Device(NamedTuple):
    """One CUDA device: name, compute capability, memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Facts:
    """What the rules of selection know of the machine.

    ``capability`` is the compute capability, (9, 0) for SM90; ``packages`` holds the version of each optional
    package, None when it is not installed; ``toolkit`` is the CUDA toolkit's root, nvcc, version and so on.
    ``c_compiler`` and ``python_headers`` (the folder of ``Python.h``) are what Triton builds its launcher with.
    ``kernels`` says of kernels of other projects where they are on this machine, and why one cannot be had.
    """

    device: str
    capability: tuple[int, int] | None = None
    device_name: str | None = None
    device_count: int = 0
    torch: str = ""
    python: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)
    toolkit: dict[str, Any] | None = None
    c_compiler: str | None = None
    python_headers: str | None = None
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)

    def replace(self, **changes: Any) -> Facts:
        """Return other facts, to ask about a machine that is not here.

        A capability without a device means ``device="cuda"``; ``device="cpu"`` without one clears it.

        Raises:
            LayoutError: a name that is no field.
        """
        names = [one.name for one in dataclasses.fields(self)]
        unknown = sorted(set(changes) - set(names))
        if unknown:
            raise LayoutError(
                "facts have no such field",
                found=", ".join(unknown),
                needed=f"one of {', '.join(names)}",
                hint="versions are in torch, python, packages and toolkit",
            )
        if changes.get("capability") is not None:
            changes.setdefault("device", "cuda")
        elif changes.get("device") == "cpu":
            changes["capability"] = None
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as nested plain data."""
        return dataclasses.asdict(self)


def environment(kind: str) -> tuple[Any, ...]:
    """Return the values of the variables that facts of this kind of device depend on; cheap to compare."""
    budget = _ENVIRON.get(_BUDGET)
    return (budget,) if kind == "cpu" else (budget, *map(_ENVIRON.get, _MACHINE))


def environment_checks() -> bool:
    """Return whether ``ROUTED_EXPERTS_CHECKED`` asks for ids to be checked; cheap enough for every call."""
    return _ENVIRON.get(_CHECKED) not in _OFF


def keeps_first_product() -> bool:
    """Return whether ``fused`` keeps its first product for the backward: no with ``ROUTED_EXPERTS_FUSED_RECOMPUTE``."""
    return _ENVIRON.get(_RECOMPUTE) in _OFF


def uses_main_gradients() -> bool:
    """Return whether ``ROUTED_EXPERTS_MAIN_GRAD`` asks for weight gradients to be added to ``main_grad``."""
    return _ENVIRON.get(_MAIN_GRAD) not in _OFF


def batched_budget() -> int:
    """Bytes that copies of weights may take at a time: ``ROUTED_EXPERTS_BATCHED_BYTES``, 1 GiB if unset.

    Raises:
        LayoutError: the variable is not a whole number of at least 0.
    """
    text = os.environ.get(BATCHED_BYTES, "").strip()
    if not text:
        return DEFAULT_BYTES
    if not text.isdecimal():
        raise LayoutError(
            f"{BATCHED_BYTES} cannot be read",
            found=repr(text),
            needed="a whole number of bytes",
            hint=f"export {BATCHED_BYTES}={DEFAULT_BYTES}, or unset it",
        )
    return min(int(text), _MOST_BYTES)


def current_facts(device: str | torch.device | None = None) -> Facts:
    """Return the facts of this machine for ``device``, by default the first CUDA device, else the CPU.

    Raises:
        DeviceError: no device of torch, or a CUDA device that this process does not have.
    """
    return _gathered(_settled(device), environment("cuda"), True)


def facts_for(device: torch.device) -> Facts:
    """Return what selection needs for ``device``; for the CPU neither GPUs nor a toolkit are looked for."""
    on_cpu = device.type == "cpu"
    return _gathered(_settled(device), () if on_cpu else environment("cuda"), not on_cpu)


def _settled(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if list_devices() else "cpu"
    device = parse_device(device)
    return torch.device("cpu") if device.type == "meta" else device


def parse_device(device: str | torch.device) -> torch.device:
    """Return the torch device of that name; raise DeviceError if there is none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            "no such device",
            found=repr(device),
            needed="a torch device",
            hint='"cpu", "cuda" or "cuda:1"',
        ) from error


@functools.lru_cache(maxsize=32)
def _gathered(device: torch.device, _environment: tuple[Any, ...], whole: bool) -> Facts:
    found = _cuda_device(device) if device.type == "cuda" else None
    return Facts(
        device=device.type,
        capability=found.capability if found else None,
        device_name=found.name if found else platform.processor() or platform.machine(),
        device_count=len(list_devices()) if whole else 0,
        torch=str(torch.__version__),
        python=platform.python_version(),
        packages={name: package_version(name) for name in PACKAGES},
        toolkit=_toolkit() if whole else None,
        c_compiler=_c_compiler(),
        python_headers=_python_headers(),
        kernels=_kernels() if whole else {},
    )


def forget_facts() -> None:
    """Ask the machine anew next time: a package was installed, a device went."""
    _gathered.cache_clear()
    forget_gpus()


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _c_compiler() -> str | None:
    """The compiler that Triton takes, looked for in its order."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def _python_headers() -> str | None:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder that its packages do not write to.
    folder = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    return folder if os.path.isfile(os.path.join(folder, "Python.h")) else None


def _toolkit() -> dict[str, Any]:
    from routed_experts.toolkit import find_toolkit

    found: dict[str, Any] = find_toolkit().to_dict()
    return found


def _kernels() -> dict[str, dict[str, Any]]:
    from routed_experts.loaders import kernel_facts

    return kernel_facts()


def _cuda_device(device: torch.device) -> Device:
    devices = list_devices()
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if index >= len(devices):
        raise DeviceError(
            f"no device {device}",
            found=f"{len(devices)} CUDA devices",
            needed=f"device {device}",
            hint="to ask about another machine pass facts=current_facts().replace(capability=(9, 0))",
        )
    return devices[index]


def list_devices() -> list[Device]:
    """Return the CUDA devices of this process, in torch's order, without starting a context."""
    if torch.version.cuda is None:
        return []
    if torch.cuda.is_initialized():
        found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
        return [Device(one.name, (one.major, one.minor), one.total_memory) for one in found]
    return [Device(gpu.name, gpu.capability, gpu.memory_bytes or 0) for gpu in visible_gpus() if gpu.capability]
