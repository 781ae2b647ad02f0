"""Stand-ins for kernels of other projects, in torch: they refuse what the real ones refuse or misread, and compute it.

Arguments, shapes, strides and alignments are those of the published builds; a wrong call is an AssertionError. Rows
that a real kernel leaves unwritten are left unwritten here.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def unpack_exponents(packed: Tensor, groups: int) -> Tensor:
    """int32 (..., words) to float32 (..., groups): a byte is an exponent, the lowest byte first."""
    parts = torch.stack([(packed >> shift) & 0xFF for shift in (0, 8, 16, 24)], -1)
    return torch.exp2(parts.flatten(-2)[..., :groups].float() - 127)


def unpack_fp4(weight: Tensor) -> Tensor:
    """int8 (..., K/2) to float32 (..., K), the low nibble first."""
    raw = weight.view(torch.uint8).int()
    return FP4[torch.stack([raw & 15, raw >> 4], -1).flatten(-2)]


def check_packed(sf: Tensor, rows: int, columns: int, group: int) -> Tensor:
    """UE8M0 scales as Blackwell's tensor memory accelerator reads them; returns float32 (..., rows, groups)."""
    groups = ceil_div(columns, group)
    assert sf.dtype == torch.int32
    assert sf.shape[-2:] == (rows, ceil_div(groups, 4)), (sf.shape, rows, groups)
    aligned = ceil_div(rows, 4) * 4
    assert sf.stride(-2) == 1
    assert sf.shape[-1] == 1 or sf.stride(-1) == aligned, (sf.stride(), aligned)
    if sf.dim() == 3:
        assert sf.stride(0) == aligned * sf.shape[-1]
    return unpack_exponents(sf, groups)


class FakeDeepGemm:
    """DeepGEMM on a Hopper (``major`` 9) or Blackwell (10) device."""

    __version__ = "2.5.0"

    def __init__(self, major: int = 9, alignment: int = 128) -> None:
        self.major, self.alignment, self.calls = major, alignment, []
        self.utils = SimpleNamespace(per_token_cast_to_fp8=per_token_cast_to_fp8)

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.alignment

    def m_grouped_bf16_gemm_nt_contiguous(
        self, a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False, expected_m_for_psum_layout=None
    ):
        self._bf16(a, b, b.mT, d, grouped_layout, compiled_dims, use_psum_layout)

    def m_grouped_bf16_gemm_nn_contiguous(self, a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False):
        self._bf16(a, b, b, d, grouped_layout, compiled_dims, use_psum_layout)

    def m_grouped_fp8_fp4_gemm_nt_contiguous(
        self,
        a,
        b,
        d,
        grouped_layout,
        recipe=None,
        recipe_a=None,
        recipe_b=None,
        compiled_dims="nk",
        disable_ue8m0_cast=False,
        use_psum_layout=False,
        expected_m_for_psum_layout=None,
    ):
        (a, a_sf), (b, b_sf) = a, b
        assert recipe_a is None
        assert recipe_b is None
        fp4 = b.dtype == torch.int8
        rows, columns = a.shape
        assert a.dtype == torch.float8_e4m3fn
        assert b.dtype in (torch.float8_e4m3fn, torch.int8)
        groups, height, width = b.shape
        self._check(a, b, d, grouped_layout, use_psum_layout, columns, width * (2 if fp4 else 1))
        if self.major == 9:
            assert not fp4, "Hopper has no FP4 kernel"
            scale_a, scale_b = self._hopper_scales(a_sf, b_sf, recipe, rows, columns, groups, height)
            group = 128
        else:
            group = 32 if fp4 else 128
            assert recipe == (1, 1, group)
            scale_a = check_packed(a_sf, rows, columns, group)
            scale_b = check_packed(b_sf, height, columns, group)
        spread = lambda scale: scale.repeat_interleave(group, -1)[..., :columns]  # noqa: E731
        left = a.float() * spread(scale_a)
        right = (unpack_fp4(b) if fp4 else b.float()) * spread(scale_b)
        self._multiply(left, right.mT, d, grouped_layout, use_psum_layout)

    def m_grouped_fp8_fp4_gemm_nn_contiguous(self, *args, **kwargs):
        raise AssertionError("both operands must be K-major")

    def fp8_fp4_gemm_nt(self, a, b, d, c=None, recipe=None):
        raise AssertionError("no grouped product")

    def transform_sf_into_required_layout(
        self, sf, mn, k, recipe, num_groups=None, is_sfa=None, disable_ue8m0_cast=False
    ):
        assert len(recipe) == 2
        assert is_sfa is None
        assert sf.dtype == torch.float32
        assert sf.shape == (num_groups, ceil_div(mn, recipe[0]), ceil_div(k, recipe[1]))
        bits = sf.contiguous().view(torch.int32)
        assert not (bits & 0x7FFFFF).any(), "no powers of two"
        words = (bits >> 23).to(torch.uint8).contiguous().view(torch.int32)
        out = words.new_empty(words.shape[0], words.shape[2], ceil_div(mn, 4) * 4).transpose(1, 2)[:, :mn]
        return out.copy_(words)

    def _hopper_scales(self, a_sf, b_sf, recipe, rows, columns, groups, height):
        assert recipe is None
        per_row = (rows, ceil_div(columns, 128))
        assert a_sf.dtype == b_sf.dtype == torch.float32
        assert a_sf.shape == per_row
        aligned = ceil_div(rows, 4) * 4
        in_columns = a_sf.stride(0) == 1 and (per_row[1] == 1 or a_sf.stride(1) == aligned)
        assert a_sf.is_contiguous() or in_columns
        assert b_sf.shape == (groups, ceil_div(height, 128), ceil_div(columns, 128))
        assert b_sf.is_contiguous(), "scales of weights are not padded"
        return a_sf, b_sf.repeat_interleave(128, 1)[:, :height]

    def _bf16(self, a, b, right, d, grouped_layout, compiled_dims, psum):
        assert compiled_dims == "nk"
        assert a.dtype == b.dtype == torch.bfloat16
        self._check(a, b, d, grouped_layout, psum, a.shape[1], right.shape[1])
        assert d.shape[1] == right.shape[2]
        self._multiply(a.float(), right.float(), d, grouped_layout, psum)

    def _check(self, a, b, d, layout, psum, inner, inner_of_weight):
        assert a.dim() == d.dim() == 2
        assert b.dim() == 3
        assert a.stride() == (a.shape[1], 1), "rows must be K-major"
        assert b.stride(0) == b.shape[1] * b.shape[2], "experts must lie one after the other"
        assert b.stride(2) == 1
        assert b.stride(1) == b.shape[2]
        assert d.dtype == torch.bfloat16
        assert d.stride(-1) == 1
        assert d.shape[0] == a.shape[0]
        assert inner == inner_of_weight
        assert layout.dtype == torch.int32
        assert layout.is_contiguous()
        assert psum == (self.major >= 10)
        assert layout.shape == ((b.shape[0],) if psum else (a.shape[0],))
        assert a.shape[0] % 1 == 0
        self.calls.append((a, b, d, layout))

    def _multiply(self, left, right, d, layout, psum):
        for expert, rows in self._groups(layout, psum, left.shape[0]):
            d[rows] = (left[rows] @ right[expert]).to(d.dtype)

    def _groups(self, layout, psum, height):
        if psum:
            ends = layout.tolist()
            starts = [0, *ends[:-1]]
            assert all(end % self.alignment == 0 for end in ends)
            assert ends == sorted(ends)
            assert not ends or ends[-1] <= height
            return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]
        # The kernel reads the expert of a whole block from its first row.
        found = []
        for first in range(0, height, self.alignment):
            block = layout[first : first + self.alignment]
            own = block[block >= 0]
            if own.numel():
                assert int(block[0]) >= 0
                assert (own == own[0]).all()
                rows = torch.arange(first, first + len(block))[block >= 0]
                found.append((int(own[0]), rows))
        return found


def per_token_cast_to_fp8(x, use_ue8m0, gran_k=128, use_packed_ue8m0=False):
    assert x.dim() == 2
    assert not use_packed_ue8m0 or use_ue8m0
    rows, columns = x.shape
    assert columns % gran_k == 0
    parts = x.float().view(rows, -1, gran_k)
    scale = parts.abs().amax(-1).clamp(1e-4) / 448
    if use_ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (parts / scale[..., None]).to(torch.float8_e4m3fn).view(rows, columns)
    if use_packed_ue8m0:
        assert scale.shape[1] % 4 == 0
        scale = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    return values, scale


class ActivationType(enum.Enum):
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    REGLU = "reglu"


class FakeSonicMoe:
    """SonicMoE's general entry point."""

    enums = SimpleNamespace(ActivationType=ActivationType)

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def moe_general_routing_inputs(
        self,
        x,
        router_scores,
        token_indices,
        expert_indices,
        w1,
        b1,
        w2,
        b2,
        E,
        stream_id,
        activation_type,
        is_inference_mode_enabled=False,
        concat_layout=False,
    ):
        tokens, hidden = x.shape
        assert tokens > 0
        assert x.dtype == w1.dtype == w2.dtype == torch.bfloat16
        assert router_scores.dtype == torch.float32
        assert token_indices.dtype == expert_indices.dtype == torch.int32
        assert router_scores.dim() == 1
        assert router_scores.shape == token_indices.shape == expert_indices.shape
        assert (token_indices[1:] >= token_indices[:-1]).all()
        assert (expert_indices >= 0).all(), "negative ids are read out of bounds"
        inner = w2.shape[1]
        assert w1.shape == (2 * inner, hidden, E)
        assert w2.shape == (hidden, inner, E)
        assert (b1 is None) == (b2 is None)
        if b1 is not None:
            assert b1.shape == (E, 2 * inner)
            assert b2.shape == (E, hidden)
        assert stream_id is None or isinstance(stream_id, int)
        assert is_inference_mode_enabled == (not torch.is_grad_enabled())
        self.calls.append({"w1": w1, "w2": w2, "type": activation_type, "concat": concat_layout})
        act = {
            "SWIGLU": torch.nn.functional.silu,
            "GEGLU": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
            "REGLU": torch.relu,
        }[activation_type.name]
        out = x.new_zeros(tokens, hidden, dtype=torch.float32)
        for s in range(len(token_indices)):
            e, t = int(expert_indices[s]), int(token_indices[s])
            if e >= E:
                continue
            up = w1[:, :, e].float() @ x[t].float() + (0 if b1 is None else b1[e].float())
            gate, linear = up.chunk(2) if concat_layout else (up[0::2], up[1::2])
            down = w2[:, :, e].float() @ (act(gate) * linear) + (0 if b2 is None else b2[e].float())
            out = out.index_add(0, torch.tensor([t]), (router_scores[s] * down)[None])
        return out.to(x.dtype), torch.bincount(expert_indices.clamp(max=E), minlength=E)[:E].int()
