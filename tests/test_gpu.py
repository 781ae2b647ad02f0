"""The same promises on a CUDA device; skipped, with the reason, where there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from oracle import TOLERANCE, experts_oracle, relative_error
from test_backends import PAIRWISE, run_all_rows

import routed_experts as rx
from routed_experts.layout import ID_CODES, build_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Forward only: what `fused` has of its own is in test_gpu_fused.py.
FUSED = "fused"
RUNNABLE = ("eager", "batched_mm", "grouped_mm", FUSED, "auto")
EXPERTS, HIDDEN, INNER = 8, 64, 32


def make(dtype=torch.bfloat16, **flags):
    g = torch.Generator().manual_seed(0)
    tensors = {
        "gate_up_proj": torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g) * HIDDEN**-0.5,
        "down_proj": torch.randn(EXPERTS, HIDDEN, INNER, generator=g) * INNER**-0.5,
    }
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    return rx.ExpertWeights(**{name: t.cuda() for name, t in tensors.items()}, **flags), tensors


def inputs(tokens=17, dtype=torch.bfloat16, seed=1):
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, EXPERTS + 1, (tokens, 2), generator=g)
    return torch.randn(tokens, HIDDEN, generator=g).to(dtype), index, torch.rand(tokens, 2, generator=g)


@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_every_pair_of_factors(case, poisoned):
    poisoned()
    assert run_all_rows(case, "cuda")


def same_layout(ours, device):
    for one, other in zip(ours, device, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other.cpu())


@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("tokens", [0, 1, 17, 1024, 1025, 4096, 131073])
@pytest.mark.parametrize("experts", [1, 3, 60, 160, 1024, 4096])
def test_layout_is_the_same_bits(tokens, experts, alignment):
    ids = torch.randint(-1, experts + 2, (tokens, 8))
    same_layout(build_layout(ids, experts, alignment=alignment), build_layout(ids.cuda(), experts, alignment=alignment))


@pytest.mark.parametrize("tokens", [33, 4096])
@pytest.mark.parametrize("dtype", ID_CODES, ids=str)
def test_layout_of_every_id_dtype_and_stride(dtype, tokens):
    info = torch.iinfo(dtype)
    ids = torch.randint(max(info.min, -1), 100, (tokens, 8)).to(dtype)
    ids[5, :4] = torch.tensor([info.min, info.max, info.max - 1, 60], dtype=dtype)
    for view in (ids, ids[:, 1:4], ids.t(), ids[5:6].expand(tokens, 8)):
        same_layout(build_layout(view, 60, alignment=16), build_layout(view.cuda(), 60, alignment=16))


def test_layout_runs_in_triton():
    from routed_experts.layout import _kernels

    assert _kernels() is not None


@pytest.mark.parametrize("tokens", [64, 2048])
def test_tiles_replay_with_other_ids(tokens):
    from routed_experts.kernels.layout import sorted_tiles

    ids = torch.randint(-1, 66, (tokens, 8), device="cuda")
    sorted_tiles(ids, 64, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sorted_tiles(ids, 64, 16)
    for skewed in (False, True):
        ids.random_(-1, 66)
        if skewed:
            ids[:, :6] = 7
        graph.replay()
        layout = build_layout(ids.cpu(), 64)
        assert torch.equal(captured.order.cpu(), layout.order)
        rows = captured.rows.cpu().long()
        used = rows > 0
        # Each expert's tiles, first rows first, the largest expert first.
        counts, begins = layout.counts.long(), (layout.offsets - layout.counts).long()
        by_size = counts.argsort(descending=True, stable=True)
        wanted = by_size.repeat_interleave((counts[by_size] + 15) // 16)
        assert torch.equal(captured.expert.cpu()[used].long(), wanted)
        assert (captured.expert.cpu()[~used] == -1).all()
        assert int(rows.sum()) == int(counts.sum())
        done = torch.cat([torch.arange(0, int(count), 16) for count in counts[by_size]])
        assert torch.equal(captured.first.cpu()[used].long(), begins[wanted] + done)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layout_on_a_device_that_is_not_the_current_one():
    ids = torch.randint(-1, 66, (64, 8))
    same_layout(build_layout(ids, 64, alignment=16), build_layout(ids.to("cuda:1"), 64, alignment=16))
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("backend", ["batched_mm", "grouped_mm", FUSED])
def test_captured_and_replayed(backend):
    """B72: capture, then replay with other tokens and other routing."""
    weights, tensors = make()
    static = [t.cuda() for t in inputs()]
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        rx.run_experts(*static, weights, backend=backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = rx.run_experts(*static, weights, backend=backend)
    for seed in (2, 3):
        fresh = inputs(seed=seed)
        for place, value in zip(static, fresh, strict=True):
            place.copy_(value)
        graph.replay()
        wanted = experts_oracle(*fresh, tensors, {})
        assert relative_error(out.cpu(), wanted) < TOLERANCE[torch.bfloat16]


def test_a_path_that_waits_is_declined_while_capturing():
    weights = rx.ExpertWeights(gate_up_proj=torch.randn(4, 10, 6).cuda(), down_proj=torch.randn(4, 6, 5).cuda())
    with pytest.raises(rx.RoutedExpertsError) as caught:
        rx.select_backend(weights, num_tokens=4, backend="grouped_mm", capturing=True)
    assert "captur" in str(caught.value)
    assert rx.select_backend(weights, num_tokens=4, capturing=True).name in ("batched_mm", FUSED)


@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm", FUSED])
def test_no_host_sync_without_the_loop(backend):
    weights, _ = make()
    args = [t.cuda() for t in inputs()]
    rx.run_experts(*args, weights, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rx.run_experts(*args, weights, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", RUNNABLE)
def test_equal_bits_twenty_times(backend):
    """B33."""
    weights, _ = make()
    args = [t.cuda() for t in inputs(512)]
    first = rx.run_experts(*args, weights, backend=backend)
    for _ in range(20):
        assert torch.equal(rx.run_experts(*args, weights, backend=backend), first)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_float32_is_float32(backend):
    """B18: no TF32 unless torch's own switch allows it."""
    g = torch.Generator().manual_seed(0)
    tensors = {
        "gate_up_proj": torch.randn(2, 512, 512, generator=g) * 512**-0.5,
        "down_proj": torch.randn(2, 512, 256, generator=g) * 256**-0.5,
    }
    weights = rx.ExpertWeights(**{name: t.cuda() for name, t in tensors.items()})
    x, index, w = (
        torch.randn(9, 512, generator=g),
        torch.randint(0, 2, (9, 2), generator=g),
        torch.rand(9, 2, generator=g),
    )
    out = rx.run_experts(x.cuda(), index.cuda(), w.cuda(), weights, backend=backend)
    assert relative_error(out.cpu(), experts_oracle(x, index, w, tensors, {})) < 1e-5


@pytest.mark.parametrize("backend", RUNNABLE)
def test_autocast_on_the_device(backend):
    weights, tensors = make(torch.float32)
    x, index, w = inputs(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = rx.run_experts(x.cuda(), index.cuda(), w.cuda(), weights, backend=backend)
    assert out.dtype == torch.float32
    assert relative_error(out.cpu(), experts_oracle(x, index, w, tensors, {})) < TOLERANCE[torch.bfloat16]


def test_weights_elsewhere_are_named():
    """B69."""
    weights, _ = make()
    with pytest.raises(rx.DeviceError, match="gate_up_proj on cuda:0, hidden_states on cpu"):
        rx.run_experts(*inputs(), weights)


@pytest.mark.parametrize("backend", ["auto", "grouped_mm", "batched_mm", FUSED])
def test_compiled_on_the_device(backend):
    weights, tensors = make()
    x, index, w = inputs()
    compiled = torch.compile(lambda *args: rx.run_experts(*args, weights, backend=backend), fullgraph=True)
    with torch.no_grad():
        out = compiled(x.cuda(), index.cuda(), w.cuda())
    assert relative_error(out.cpu(), experts_oracle(x, index, w, tensors, {})) < TOLERANCE[torch.bfloat16]


def test_doctor_leaves_cuda_alone():
    """B56: no context after import, discovery and doctor."""
    code = (
        "import torch, routed_experts as rx\n"
        "from click.testing import CliRunner\n"
        "from routed_experts.cli import main\n"
        "result = CliRunner().invoke(main, ['doctor', '--json'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'cuda' in result.output\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def tiny_qwen():
    """A float32 Qwen3-MoE on the device, experts at unit gain so that a wrong one changes the tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).cuda().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weight.normal_(std=weight.shape[-1] ** -0.5)
    rx.register_with_transformers()
    yield model
    rx.unregister_from_transformers()


@pytest.mark.parametrize("beams", [1, 2])
def test_generate_switches_once_and_gives_the_same_tokens(tiny_qwen, beams, asked):
    """Prefill on grouped_mm, decode on batched_mm, and back; the tokens are the model's own."""
    ids = torch.arange(1, 9, device="cuda")[None]
    arguments = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    wanted = tiny_qwen.generate(ids, **arguments)
    rx.set_experts_implementation(tiny_qwen, "grouped_mm")
    got = tiny_qwen.generate(ids, **arguments)
    assert torch.equal(got, wanted)
    layers = tiny_qwen.config.num_hidden_layers
    assert asked[:layers] == ["grouped_mm"] * layers
    assert asked[layers:] == ["batched_mm"] * (len(asked) - layers)
    assert len(asked) == 8 * layers
    assert rx.get_experts_implementation(tiny_qwen) == {"": "grouped_mm"}
