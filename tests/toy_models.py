"""Plain torch models with experts of every kind, for the tests of switching."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from routed_experts.decorator import use_experts_implementation

E, H, I = 4, 8, 8  # noqa: E741


class Foreign(nn.Module):
    """Experts of another library: no decorator of ours, own argument names, a forward we can recognise."""

    def __init__(self, config: object = None, device: str = "cpu") -> None:
        super().__init__()
        self.num_experts = E
        self.is_transposed = False
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, H, device=device))
        self.down_proj = nn.Parameter(torch.empty(E, H, I, device=device))
        self.act_fn = nn.SiLU()
        if config is not None:
            self.config = config

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        return torch.full_like(hidden_states, 7.0)


@use_experts_implementation
class Own(Foreign):
    """The same, built on this package."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return torch.full_like(hidden_states, 9.0)


class Batched(nn.Module):
    """Experts in the way of llama4: sorted rows in, no routing arguments, no flag for transposed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.randn(E, H, 2 * I))
        self.down_proj = nn.Parameter(torch.randn(E, I, H))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states):
        return hidden_states


class Packed(nn.Module):
    """Experts in the way of dbrx: one 2-D matrix for all."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.w1 = nn.Parameter(torch.randn(E * I, H))


class Stack(nn.Module):
    """A plain torch model of the given experts."""

    def __init__(self, *experts: nn.Module) -> None:
        super().__init__()
        self.inlet = nn.Linear(H, H)
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": module}) for module in experts)

    def forward(self, x, index, weights):
        for layer in self.layers:
            x = layer["experts"](x, index, weights)
        return x


class Config:
    """As much of a transformers config as the switch reads."""

    def __init__(self, **sub_configs: Config | None) -> None:
        self.sub_configs = dict.fromkeys(sub_configs, Config)
        self._experts_implementation_internal: str | None = "grouped_mm"
        self.__dict__.update(sub_configs)

    @property
    def _experts_implementation(self) -> str | None:
        return self._experts_implementation_internal


class Composite(nn.Module):
    """Two backbones with experts, and a sub-config without any."""

    def __init__(self, device: str = "cpu", audio_device: str | None = None) -> None:
        super().__init__()
        self.config = Config(text_config=Config(), audio_config=Config(), vision_config=Config(), absent_config=None)
        self.text = Stack(Foreign(self.config.text_config, device), Foreign(self.config.text_config, device))
        self.audio = nn.ModuleDict({"experts": Foreign(None, audio_device or device)})
        self.audio.config = self.config.audio_config


KEYS = ["", "text_config", "audio_config", "vision_config"]

# The audio experts hold no config, as undecorated classes do: whatever it says, they run their own forward.
FRESH = dict.fromkeys(KEYS, "transformers:grouped_mm") | {"audio_config": "transformers:eager"}


def gate(u: torch.Tensor) -> torch.Tensor:
    return F.silu(u[..., :I]) * u[..., I:]


def state(model: nn.Module) -> list[object]:
    """Everything a switch may touch, module by module."""
    return [{k: v for k, v in m.__dict__.items() if not k.startswith("_p")} for m in model.modules()]
