"""The parts of a model that choose a backend on their own: its top level, and each of its sub-configs.

Experts modules are found by what they carry, never by class or source text, and belong to the sub-config
whose config object they (or the nearest module around them) hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from routed_experts.errors import DtypeError, SwitchError
from routed_experts.module_weights import follows_protocol
from routed_experts.names import from_config
from routed_experts.switching import ExpertsModule, switch_of

_REMEMBERED = "_routed_experts_parts"


@dataclass
class Part:
    """One key of the mapping: its config (None for a plain torch model) and the experts modules under it."""

    key: str
    config: Any
    modules: list[ExpertsModule] = field(default_factory=list)

    def runs_on_accelerator(self) -> bool:
        """Tell whether any of the experts' weights lies outside the CPU."""
        return any(weight_device(experts.module).type != "cpu" for experts in self.modules)


@dataclass(frozen=True)
class Parts:
    """A model's parts in the order of its config, top level ("") first."""

    root: nn.Module
    by_key: dict[str, Part]

    def experts(self) -> Iterator[ExpertsModule]:
        """Every experts module, part by part."""
        for part in self.by_key.values():
            yield from part.modules

    def current(self, key: str) -> str:
        """Return the name that a part runs on.

        A part without experts runs nothing; it reads as what was asked of it, so that a mapping round-trips.

        Raises:
            SwitchError: its modules were put on different backends one by one.
        """
        part = self.by_key[key]
        names = {switch_of(experts.module).read(experts.module): experts.path for experts in part.modules}
        if len(names) > 1:
            raise SwitchError(
                f"the experts of {key!r} run on different backends, which one name cannot say",
                found=", ".join(f"{path}: {name}" for name, path in names.items()),
                needed="one backend in each part",
                hint="get_experts_implementation of the single modules, or set one name for all first",
            )
        return next(iter(names), self.remembered(key))

    def remembered(self, key: str) -> str:
        """Return the name of a part without experts."""
        stated = from_config(getattr(self.by_key[key].config, "_experts_implementation", None))
        return self.root.__dict__.get(_REMEMBERED, {}).get(key, stated)

    def remember(self, key: str, name: str) -> None:
        """Keep the name of a part without experts, on the model object and nowhere in its config."""
        setattr(self.root, _REMEMBERED, {**self.root.__dict__.get(_REMEMBERED, {}), key: name})


def parts_of(model: nn.Module) -> Parts:
    """Return the parts of any torch model, the experts modules sorted into them."""
    if not isinstance(model, nn.Module):
        raise DtypeError(
            "not a model",
            found=type(model).__name__,
            needed="an nn.Module",
            hint="pass the model, or its experts module",
        )
    root = _configured(model)
    config = getattr(root, "config", None)
    keys = getattr(config, "sub_configs", None) or {}
    parts = {"": Part("", config)}
    parts |= {key: Part(key, sub) for key in keys if (sub := getattr(config, key, None)) is not None}
    owners = {id(sub): key for key in parts if key for sub in _nested(parts[key].config)}
    for experts, around in _experts_in(root):
        held = (getattr(module, "config", None) for module in around)
        key = next((owners[id(c)] for c in held if id(c) in owners), "")
        parts[key].modules.append(experts)
    return Parts(root, parts)


def weight_device(module: nn.Module) -> torch.device:
    """Return the device of an experts module's weights."""
    with torch.no_grad():
        return module.down_proj.device  # type: ignore[return-value]


def _configured(model: nn.Module) -> nn.Module:
    """Look through wrappers of one module (data parallel, compiled) for the one with the config."""
    inner = model
    while getattr(inner, "config", None) is None and len(children := list(inner.children())) == 1:
        inner = children[0]
    return model if getattr(inner, "config", None) is None else inner


def _nested(config: Any) -> Iterator[Any]:
    """The config and, depth first, every sub-config of it."""
    yield config
    for key in getattr(config, "sub_configs", None) or {}:
        if (sub := getattr(config, key, None)) is not None:
            yield from _nested(sub)


def _experts_in(root: nn.Module) -> Iterator[tuple[ExpertsModule, list[nn.Module]]]:
    """Every experts module of ``root``, with itself and the modules around it, innermost first."""
    modules = dict(root.named_modules())
    found = [path for path, module in modules.items() if carries_experts(module)]
    for path in found:
        # Adapter wrappers pass attributes through and so look like the experts that they hold.
        if any(other != path and other.startswith(f"{path}." if path else "") for other in found):
            continue
        around = [modules[outer] for outer in _ancestors(path) if outer in modules]
        checks = (getattr(module, "get_correct_experts_implementation", None) for module in around)
        check = next((check for check in checks if check is not None), None)
        yield ExpertsModule(path, modules[path], check), around


def _ancestors(path: str) -> Iterator[str]:
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def carries_experts(module: nn.Module) -> bool:
    """Tell whether a module carries the protocol: a count, and 3-D weights up and down."""
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj"))
    return follows_protocol(module) and all(weight is None or weight.ndim == 3 for weight in weights)
