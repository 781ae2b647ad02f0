"""Tensor names of one layer's experts -> roles, stacked or one matrix per expert."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from routed_experts.checkpoint.files import few
from routed_experts.errors import CheckpointError, UnsupportedScheme

SCALE, ACTIVATION_SCALE = "_scale_inv", "_activation_scale"
# The scale of what goes into the first projection has one name, with a gate and without.
_IN_MEMORY = {"up_proj_activation_scale": "gate_up_proj_activation_scale"}

# Granite keeps its stacks under names without "experts".
_STACK = re.compile(
    r"(?P<prefix>(?:.*\.)?layers\.(?P<layer>[0-9]{1,6})\.(?:.*\.)?"
    r"(?:experts\.|block_sparse_moe\.(?=(?:input|output)_linear\.)))(?P<leaf>.+)"
)
# Shared experts are a dense MLP; multi-token-prediction layers count their layers anew.
_NOT_ROUTED = re.compile(r"(^|\.)(mtp|nextn|shared)\w*\.")

# Ends of names on disk, and of roles. A scale is what a stored value is multiplied by, whatever it is called.
_KINDS = {
    "weight": "",
    "bias": "_bias",
    "weight_scale_inv": SCALE,
    "scale": SCALE,
    "qscale_weight": SCALE,
    "activation_scale": ACTIVATION_SCALE,
}
_MATRIX = re.compile(
    rf"(?P<expert>[0-9]{{1,6}})\.(?P<role>gate_proj|up_proj|down_proj|w1|w2|w3)\.(?P<kind>{'|'.join(_KINDS)})"
)
_MATRIX_ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_STACKED_ENDS = {
    "": "",
    "_bias": "_bias",
    "_scale_inv": SCALE,
    "_activation_scale": ACTIVATION_SCALE,
    **{f".{end}": kind for end, kind in _KINDS.items()},
}
_STACKED_ROLES = {
    **{
        role + end: _IN_MEMORY.get(role + kind, role + kind)
        for role in ("gate_up_proj", "up_proj", "down_proj")
        for end, kind in _STACKED_ENDS.items()
    },
    "fc1.weight": "gate_up_proj",
    "fc2.weight": "down_proj",
    "input_linear.weight": "gate_up_proj",
    "output_linear.weight": "down_proj",
    "w13_weight": "gate_up_proj",
    "w2_weight": "down_proj",
}
# This name is written only by files whose gate and up rows alternate.
_INTERLEAVED_LEAF = "w13_weight"

_QUANTIZED = re.compile(r"scale|_blocks$|qweight|qzeros|g_idx|packed|absmax|amax|quant|zero_point")
_OF_THE_ROUTER = re.compile(r"e_score_correction_bias$|expert_bias$|^router\.|^gate\.")


@dataclass
class Stack:
    """The experts of one layer: name of the tensor for each role; roles end in ``_bias`` for biases."""

    prefix: str
    stacked: dict[str, str] = field(default_factory=dict)
    matrices: dict[int, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    interleaved: bool = False
    unknown: list[str] = field(default_factory=list)

    def add(self, leaf: str) -> None:
        """Give the tensor ``prefix + leaf`` its role, or keep it as unknown."""
        name = self.prefix + leaf
        if matrix := _MATRIX.fullmatch(leaf):
            role = _MATRIX_ROLES.get(matrix["role"], matrix["role"])
            roles = self.matrices[int(matrix["expert"])]
            known = role + _KINDS[matrix["kind"]]
        else:
            roles = self.stacked
            known = _STACKED_ROLES.get(leaf, "")
        if known and known not in roles:
            roles[known] = name
            self.interleaved |= leaf == _INTERLEAVED_LEAF
        elif not _OF_THE_ROUTER.search(leaf):
            self.unknown += [roles[known], name] if known else [name]  # two for one role: either may be the wrong one


def find_stack(names: Iterable[str], layer: int) -> Stack:
    """The one stack of experts of a transformer layer, counted as the names count it.

    Raises CheckpointError if the layer has none or several.
    """
    layers: dict[int, dict[str, Stack]] = defaultdict(dict)
    for name in names:
        match = _STACK.fullmatch(name)
        if match and not _NOT_ROUTED.search(match["prefix"]):
            stacks = layers[int(match["layer"])]
            stacks.setdefault(match["prefix"], Stack(match["prefix"])).add(match["leaf"])
    if layer not in layers:
        raise _no_experts(layer, sorted(layers))
    if len(layers[layer]) > 1:
        raise CheckpointError(
            f"layer {layer} has several stacks of experts",
            found=few(sorted(layers[layer])),
            needed="one stack",
            hint="build the model and use ExpertWeights.from_module on the experts wanted",
        )
    (stack,) = layers[layer].values()
    return stack


def _no_experts(layer: int, layers: list[int]) -> CheckpointError:
    return CheckpointError(
        f"layer {layer} has no routed experts in this checkpoint",
        found=f"experts in layers {few(layers, 100)}" if layers else "no tensor named ...layers.N....experts....",
        needed=f"tensors named ...layers.{layer}....experts....",
        hint="give one of these layers" if layers else "check that this is the checkpoint of a Mixture-of-Experts",
    )


def check_known(stack: Stack, is_quantized: bool) -> None:
    """Raise CheckpointError for tensors of no known role; UnsupportedScheme if they are of a format not declared."""
    quantized = [name for name in stack.unknown if _QUANTIZED.search(name.removeprefix(stack.prefix))]
    if quantized and not is_quantized:
        raise UnsupportedScheme(
            f"the experts under {stack.prefix} are quantized in a way that is not read",
            found=few(quantized, 3),
            needed="weights with quant_method fp8 in the config and scales named weight_scale_inv, or plain ones",
            hint="dequantize the checkpoint first, or take one in FP8",
        )
    if stack.unknown or (stack.stacked and stack.matrices):
        raise CheckpointError(
            f"the experts under {stack.prefix} are not stored in a known way",
            found=few(stack.unknown, 4) if stack.unknown else "stacked tensors beside one matrix per expert",
            needed="stacked gate_up_proj (or up_proj) and down_proj, or N.gate_proj.weight and so on, each name once",
            hint="build the model and use ExpertWeights.from_module on its experts",
        )
