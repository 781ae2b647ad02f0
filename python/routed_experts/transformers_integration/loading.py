"""At load, a dict whose ``""`` names one of ours reaches every sub-config that it does not name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from routed_experts.errors import LayoutError
from routed_experts.names import is_ours
from routed_experts.transformers_integration.adapter import Patch, PatchAdapter


class LoadingAdapter(PatchAdapter):
    """The setter of the config's property, through which every way of loading goes."""

    name = "loading"

    def make_patches(self) -> None:
        """Wrap the setter."""
        from transformers.configuration_utils import PreTrainedConfig

        if not isinstance(vars(PreTrainedConfig).get("_experts_implementation"), property):
            raise TypeError("PreTrainedConfig._experts_implementation is no property")
        self.patches.append(Patch(PreTrainedConfig, "_experts_implementation", _reach_sub_configs))


def _reach_sub_configs(original: Callable[..., None]) -> Callable[..., None]:
    def setter(self: Any, value: Any) -> None:
        if isinstance(value, dict) and any(map(is_ours, value.values())):
            _check_keys(self, value)
            if is_ours(value.get("")):
                value = dict.fromkeys(self.sub_configs, value[""]) | value
        original(self, value)

    return setter


def _check_keys(config: Any, value: dict[str, Any]) -> None:
    unknown = [key for key in value if key and key not in config.sub_configs]
    if unknown:
        raise LayoutError(
            f"{type(config).__name__} has no such part",
            found=", ".join(map(repr, unknown)),
            needed="keys among " + ", ".join(map(repr, ["", *config.sub_configs])),
            hint='"" is the top level and every sub-config without a key of its own',
        )
