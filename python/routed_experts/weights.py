"""ExpertWeights: the tensors of a layer's experts and the layout they declare.

Shapes, with E experts, hidden size H, intermediate size I (N = 2I gated, I otherwise):

=================  =====================  ===========================
tensor             ``is_transposed=False``  ``is_transposed=True``
=================  =====================  ===========================
gate_up / up_proj  (E, N, H)              (E, H, N)
down_proj          (E, H, I)              (E, I, H)
biases             (E, N) and (E, H)      (E, N) and (E, H)
=================  =====================  ===========================

Quantized weights have scales beside them, of the shapes in quantization/formats.py; FP4 stores two values of the last
axis in a byte. Sizes are always those of the values. Nothing is guessed from shapes: 2I = H and I = H are real sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from routed_experts import gates
from routed_experts.quantization.checks import as_stored, check_scale_values
from routed_experts.quantization.formats import Quantization
from routed_experts.sharding import ShardOf, mark_share
from routed_experts.weights_checks import check_declaration, check_tensors

SCALE_NAMES = (
    "gate_up_proj_scale_inv",
    "up_proj_scale_inv",
    "down_proj_scale_inv",
    "gate_up_proj_activation_scale",
    "down_proj_activation_scale",
)
WEIGHT_NAMES = (
    "gate_up_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj_bias",
    "up_proj_bias",
    "down_proj_bias",
)
TENSOR_NAMES = (*WEIGHT_NAMES, *SCALE_NAMES)

_CACHES = ("_choices", "_prepared", "_plans")


def named(tensors: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """Return tensors by their names, in the order of TENSOR_NAMES; those left out at the end are None."""
    return {**dict.fromkeys(TENSOR_NAMES), **dict(zip(TENSOR_NAMES, tensors, strict=False))}


def _is_byte(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype.itemsize == 1


def _tensor(name: str) -> property:
    return property(lambda self: self._tensors[name], doc=f"The tensor ``{name}``, or None.")


class ExpertWeights:
    """The weights of E experts and how they are laid out. Frozen: attributes cannot be set.

    Holds the very tensors it was given, no copy and no detach, so gradients land in them. See the module's
    docstring for shapes; all tensors are on one device, and all that are not quantized share one floating dtype.

    Args:
        gate_up_proj: first projection of gated experts, gate and up on one axis of 2I.
        up_proj: first projection of experts without a gate; give this or ``gate_up_proj``.
        down_proj: second projection.
        gate_up_proj_bias, up_proj_bias, down_proj_bias: biases, or None.
        gate_up_proj_scale_inv, up_proj_scale_inv, down_proj_scale_inv: what stored values of quantized weights are
            multiplied by: float32, or float8_e8m0fnu (its bytes as uint8 are taken for it). Values are checked once,
            here, which waits for the device.
        gate_up_proj_activation_scale, down_proj_activation_scale: (E,) float32, of a static scheme; the first one also
            for experts without a gate.
        activation: a name (``silu``, ``gelu``, ``gelu_pytorch_tanh``, ``relu``, ``relu2``, ...) or a callable.
        gate: a callable for a whole gate of one's own, (rows, 2I) -> (rows, I); replaces ``activation``.
        swiglu_limit: clamp the gate from above and the linear half on both sides; None is no clamp, 0 is one.
        swiglu_alpha: with it the gate is (up + 1) * gate * sigmoid(alpha * gate).
        has_gate: only needed to confirm which projection was given.
        is_transposed: y = x @ W instead of y = x @ W.T.
        is_concatenated: gate and up are halves of the 2I axis; False: even and odd columns.
        post_expert_norm: callable on (rows, H), applied to every expert's output before the routing weight.
        quantization: how the weights are quantized; None for floating weights.
        num_experts: only needed to confirm E.

    Raises:
        LayoutError: shapes, scales or flags that contradict each other.
        DtypeError: tensors of dtypes that do not go together.
        UnsupportedScheme: weights that are neither floating nor stored as ``quantization`` says.
        UnsupportedScales: scales that are 0, negative, NaN or infinite.
    """

    def __init__(
        self,
        *,
        gate_up_proj: Tensor | None = None,
        up_proj: Tensor | None = None,
        down_proj: Tensor,
        gate_up_proj_bias: Tensor | None = None,
        up_proj_bias: Tensor | None = None,
        down_proj_bias: Tensor | None = None,
        gate_up_proj_scale_inv: Tensor | None = None,
        up_proj_scale_inv: Tensor | None = None,
        down_proj_scale_inv: Tensor | None = None,
        gate_up_proj_activation_scale: Tensor | None = None,
        down_proj_activation_scale: Tensor | None = None,
        activation: str | Callable[[Tensor], Tensor] = "silu",
        gate: Callable[[Tensor], Tensor] | None = None,
        swiglu_limit: float | None = None,
        swiglu_alpha: float | None = None,
        has_gate: bool | None = None,
        is_transposed: bool = False,
        is_concatenated: bool = True,
        post_expert_norm: Callable[[Tensor], Tensor] | None = None,
        quantization: Quantization | None = None,
        num_experts: int | None = None,
    ) -> None:
        arguments = locals()
        self._set(
            {name: arguments[name] for name in TENSOR_NAMES},
            activation=activation,
            gate=gate,
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            has_gate=has_gate,
            is_transposed=bool(is_transposed),
            is_concatenated=bool(is_concatenated),
            post_expert_norm=post_expert_norm,
            quantization=quantization,
            num_experts=num_experts,
        )
        if quantization is not None:
            check_scale_values(self._tensors)

    gate_up_proj = _tensor("gate_up_proj")
    up_proj = _tensor("up_proj")
    down_proj = _tensor("down_proj")
    gate_up_proj_bias = _tensor("gate_up_proj_bias")
    up_proj_bias = _tensor("up_proj_bias")
    down_proj_bias = _tensor("down_proj_bias")
    gate_up_proj_scale_inv = _tensor("gate_up_proj_scale_inv")
    up_proj_scale_inv = _tensor("up_proj_scale_inv")
    down_proj_scale_inv = _tensor("down_proj_scale_inv")
    gate_up_proj_activation_scale = _tensor("gate_up_proj_activation_scale")
    down_proj_activation_scale = _tensor("down_proj_activation_scale")

    activation: str | Callable[[Tensor], Tensor]
    gate: Callable[[Tensor], Tensor] | None
    swiglu_limit: float | None
    swiglu_alpha: float | None
    has_gate: bool
    is_transposed: bool
    is_concatenated: bool
    post_expert_norm: Callable[[Tensor], Tensor] | None
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype  # as stored
    device: torch.device
    quantization: Quantization | None
    activation_name: str | None  # canonical name, None for a callable we do not know
    act_fn: Callable[[Tensor], Tensor]
    shard: Any = ShardOf()  # (rank, world) of a rank's share; else equal to None, and shard(rank, world) makes one
    _tensors: dict[str, Tensor | None]
    _module: nn.Module | None  # set by from_module: everything is then read from there
    # Shared by all bindings of one layout; by plain data, never by tensors, and never holding any.
    _choices: dict[Any, Any]  # rows of the backend table (selection.py)
    _prepared: dict[Any, Any]  # calls that went through before (prepared.py)
    _plans: dict[Any, Any]  # what backends have worked out for this layout

    def _set(
        self,
        tensors: dict[str, Tensor | None],
        *,
        activation: str | Callable[[Tensor], Tensor],
        num_experts: int | None,
        has_gate: bool | None,
        quantization: Quantization | None = None,
        **declared: Any,
    ) -> None:
        tensors = as_stored(tensors, quantization)
        has_gate = check_declaration(tensors, has_gate=has_gate, activation=activation, **declared)
        name = gates.activation_name(activation)
        flags = (declared["is_transposed"], declared["is_concatenated"])
        shape = check_tensors(tensors, has_gate, *flags, num_experts, quantization)
        down = tensors["down_proj"]
        assert down is not None  # check_declaration
        values = {
            **declared,
            "activation": activation,
            "activation_name": name,
            "act_fn": activation if name is None else gates.ACTIVATIONS[name],
            "has_gate": has_gate,
            "num_experts": shape[0],
            "hidden_size": shape[1],
            "intermediate_size": shape[2],
            "dtype": down.dtype,
            "device": down.device,
            "quantization": quantization,
            "_tensors": tensors,
            "_module": None,
            "_choices": {},
            "_prepared": {},
            "_plans": {},
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)  # the compiler of torch 2.9 cannot trace __dict__.update

    def __getattr__(self, name: str) -> Any:
        # Only weights of from_module lack attributes: theirs are those that the module has now.
        if self.__dict__.get("_module") is None or name.startswith("__"):
            raise AttributeError(f"ExpertWeights has no attribute {name!r}")
        return getattr(self.bind(), name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ExpertWeights is frozen: cannot set {name!r}; make a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"ExpertWeights is frozen: cannot delete {name!r}")

    @property
    def own_gate(self) -> bool:
        """Whether the gate is a callable of the user's or the model's own."""
        return self.gate is not None

    @property
    def has_bias(self) -> bool:
        """Whether any of the projections has a bias."""
        return self.up_bias is not None or self.down_proj_bias is not None

    @property
    def up_weight(self) -> Tensor:
        """First projection, gated or not: (E, N, H), or (E, H, N) if transposed."""
        weight = self.gate_up_proj if self.has_gate else self.up_proj
        assert weight is not None  # checked when made
        return weight

    @property
    def down_weight(self) -> Tensor:
        """Second projection: (E, H, I), or (E, I, H) if transposed."""
        weight = self.down_proj
        assert weight is not None  # checked when made
        return weight

    @property
    def up_bias(self) -> Tensor | None:
        """Bias of the first projection, (E, N), or None."""
        return self.gate_up_proj_bias if self.has_gate else self.up_proj_bias

    @property
    def up_scale(self) -> Tensor | None:
        """Scales of the first projection, or None if it is not quantized."""
        return self.gate_up_proj_scale_inv if self.has_gate else self.up_proj_scale_inv

    @property
    def down_scale(self) -> Tensor | None:
        """Scales of the second projection, or None if it is not quantized."""
        return self.down_proj_scale_inv

    @property
    def up_activation_scale(self) -> Tensor | None:
        """Stored scale of what enters the first projection, (E,) float32, or None."""
        return self.gate_up_proj_activation_scale

    @property
    def down_activation_scale(self) -> Tensor | None:
        """Stored scale of what enters the second projection, (E,) float32, or None."""
        return self.down_proj_activation_scale

    def tensors(self) -> list[Tensor | None]:
        """The tensors in the order of TENSOR_NAMES."""
        tensors = self.bind()._tensors
        return [tensors[name] for name in TENSOR_NAMES]

    def bind(self) -> ExpertWeights:
        """Return these weights with every attribute of a live module read once, for one call."""
        if self._module is None:
            return self
        from routed_experts.module_weights import resolve

        return resolve(self._module)

    def with_tensors(self, tensors: dict[str, Tensor | None], **functions: Any) -> ExpertWeights:
        """Return the same declared layout over other tensors of the same shapes, strides and dtypes, unchecked.

        ``functions`` are attributes that stand for the same computation in another object.
        """
        return from_state({**self.__dict__, "_tensors": tensors, **functions})

    @classmethod
    def from_module(cls, module: nn.Module) -> ExpertWeights:
        """Read the experts of a module that follows the experts protocol, live: later changes are seen.

        Tensors, dtype, device, flags and functions are always those that the module has at that moment; each
        call checks what has changed.

        Raises:
            LayoutError: no ``num_experts``, ``down_proj`` and ``gate_up_proj`` or ``up_proj``, or parameters that
                do not fit the flags that the module declares.
            UnsupportedScheme: parameters quantized in a way that is not run here.
            UnsupportedScales: scales that are 0, negative, NaN or infinite; looked at here, and at the first call of
                a module alone.
        """
        from routed_experts.module_weights import resolve

        check_scale_values(resolve(module)._tensors)
        weights = object.__new__(cls)
        weights.__dict__["_module"] = module
        return weights

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        layer: int = 0,
        *,
        dequantize: bool = False,
        rank: int | None = None,
        world: int | None = None,
        device: torch.device | str | None = None,
    ) -> ExpertWeights:
        """Read one layer's experts from a safetensors checkpoint; see checkpoint.py for the layouts it knows.

        Args:
            path: folder with ``config.json`` and safetensors files (an index included), or one file.
            layer: index of the transformer layer, as in the tensor names.
            dequantize: load a quantized checkpoint as bfloat16.
            rank, world: read only the experts of this rank, E/world of them.
            device: where the tensors go; the CPU by default.

        Raises:
            CheckpointError: missing, corrupt or incomplete files, unknown layout, a layer without experts.
        """
        from routed_experts.checkpoint import read_experts

        arguments = read_experts(path, layer, dequantize=dequantize, rank=rank, world=world, device=device)
        shard = arguments.pop("shard", None)
        weights = cls(**arguments)
        if shard is not None:
            mark_share(weights, *shard)
        return weights

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write a folder that from_checkpoint reads back bit for bit; callables cannot be stored."""
        from routed_experts.checkpoint import write_experts
        from routed_experts.reshaped import check_unshaped

        check_unshaped(self.tensors())
        write_experts(self, path)

    def __getstate__(self) -> dict[str, Any]:
        # A copy may go to another process or machine: what was found out on this one stays here.
        state = {name: {} if name in _CACHES else value for name, value in self.__dict__.items()}
        if state.get("quantization") is not None:
            # pickle knows no storage of the 8-bit floats: their bytes travel.
            tensors = state["_tensors"].items()
            state["_tensors"] = {name: t.view(torch.uint8) if _is_byte(t) else t for name, t in tensors}
            state["_bytes"] = {name: t.dtype for name, t in tensors if _is_byte(t)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        dtypes = state.pop("_bytes", {})
        self.__dict__.update(state)
        if dtypes:
            seen = {name: self._tensors[name].view(dtype) for name, dtype in dtypes.items()}  # type: ignore[union-attr]
            self.__dict__["_tensors"] = {**self._tensors, **seen}

    def __repr__(self) -> str:
        flags = [name for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated") if getattr(self, name)]
        scheme = "" if self.quantization is None else f", quantization={self.quantization}"
        return (
            f"ExpertWeights(num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, dtype={self.dtype}, device={str(self.device)!r}, "
            f"activation={self.activation_name or self.activation!r}, {', '.join(flags)}{scheme})"
        )


def from_state(state: dict[str, Any]) -> ExpertWeights:
    """Return weights whose attributes are ``state``, unchecked and not copied."""
    weights = object.__new__(ExpertWeights)
    object.__setattr__(weights, "__dict__", state)
    return weights
