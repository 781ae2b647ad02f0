"""Releases without ``model.get_experts_implementation()``: add it."""

from __future__ import annotations

from typing import Any

from routed_experts.transformers_integration.adapter import Plan


def get_experts_implementation(self: Any) -> dict[str, str | None]:
    """Return the experts implementation of the model (``""``) and of each of its sub-configs."""
    found = {"": self.config._experts_implementation}
    for key in self.config.sub_configs:
        if (sub_config := getattr(self.config, key, None)) is not None:
            found[key] = sub_config._experts_implementation
    return found


class GetMethodAdapter:
    """The method on PreTrainedModel, where the release has none."""

    name = "get_experts_implementation"

    def install(self, plan: Plan) -> None:
        """Add the method."""
        from transformers import PreTrainedModel

        if not hasattr(PreTrainedModel, self.name):
            setattr(PreTrainedModel, self.name, get_experts_implementation)

    def uninstall(self) -> None:
        """Remove it if it is ours."""
        from transformers import PreTrainedModel

        if vars(PreTrainedModel).get(self.name) is get_experts_implementation:
            delattr(PreTrainedModel, self.name)
