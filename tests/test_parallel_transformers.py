"""Our exchange inside transformers' own expert parallelism, on gloo ranks: logits and gradients of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_ranks import all_good, run_ranks

import routed_experts as rx

pytest.importorskip("transformers.distributed.expert_parallel", reason="this transformers has no registry of them")

TOKENS = torch.arange(14).view(2, 7) * 3 % 64


def tiny_config() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.2,
    )


def save_model(path: Any) -> None:
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(tiny_config()).save_pretrained(path)


def load(path: Any, name: str, **sizes: int) -> Any:
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    wanted = DistributedConfig(**sizes, ep_implementation="routed_experts")
    # What from_pretrained(distributed_config=...) does with the config, which also asks for accelerate.
    config, _, mesh = Qwen3MoeForCausalLM.prepare_distribute_model(wanted)
    model = Qwen3MoeForCausalLM.from_pretrained(path, experts_implementation=name)
    return Qwen3MoeForCausalLM.maybe_distribute_model(model, config, mesh)


def compare(rank: int, path: str, names: tuple[str, ...], sizes: dict[str, int]) -> list[tuple[float, float, int]]:
    """Largest difference of logits and of the embedding's gradient from one rank's model, and the local experts."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    rx.register_with_transformers()
    plain = transformers.Qwen3MoeForCausalLM.from_pretrained(path, experts_implementation="eager")
    wanted = plain(TOKENS, labels=TOKENS)
    wanted.loss.backward()
    found = []
    for name in names:
        model = load(path, name, **sizes)
        out = model(TOKENS, labels=TOKENS)
        out.loss.backward()
        logits = float((out.logits - wanted.logits).detach().abs().max() / wanted.logits.detach().abs().max())
        ours, right = (m.model.embed_tokens.weight.grad for m in (model, plain))
        ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        with torch.no_grad():
            assert torch.allclose(model(TOKENS).logits, wanted.logits, atol=1e-4)
        experts = model.model.layers[0].mlp.experts
        found.append((logits, float((ours - right).abs().max() / right.abs().max()), experts.num_experts))
    return found


@pytest.mark.parametrize(("world", "sizes"), [(2, {"tp_size": 2, "ep_size": 2})])
def test_logits_and_gradients_of_one_rank(world, sizes, tmp_path):
    save_model(tmp_path / "model")
    names = ("routed_experts", "routed_experts_grouped_mm", "grouped_mm")
    results = all_good(run_ranks(compare, world, tmp_path / "ranks", str(tmp_path / "model"), names, sizes))
    for result in results:
        for name, (logits, grads, experts) in zip(names, result, strict=True):
            assert logits < 1e-5, (name, logits)
            assert grads < 1e-4, (name, grads)
            assert experts == 8 // sizes["ep_size"]


def batches_of_their_own(rank: int) -> list[float]:
    """Two tensor-parallel pairs with a batch each, experts over all four ranks: values and gradients of one rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import EPImplementationInterface

    rx.register_with_transformers()
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    full = rx.RoutedExperts(8, 32, 16)
    for parameter in full.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    experts = rx.RoutedExperts(2, 32, 16)
    for name, parameter in experts.named_parameters():
        parameter.data.copy_(getattr(full, name).data[2 * rank : 2 * rank + 2])
    experts._is_expert_parallel = True
    found = []
    for tokens in (7, 1, 0):
        g = torch.Generator().manual_seed(rank // 2)
        x, index = torch.randn(tokens, 32, generator=g), torch.randint(0, 8, (tokens, 3), generator=g)
        weights, seed = torch.rand(tokens, 3, generator=g), torch.randn(tokens, 32, generator=g)
        x.requires_grad_()
        weights.requires_grad_()
        wanted = full(x, index, weights)
        right = torch.autograd.grad(wanted, (x, weights), seed)
        exchange = EPImplementationInterface()["routed_experts"](experts, whole, pairs["tp"])
        assert not exchange.shares_batch
        out = exchange(x, index, weights)
        ours = torch.autograd.grad(out, (x, weights), seed)
        for one, two in zip((out, *ours), (wanted, *right), strict=True):
            assert one.shape == two.shape
            found.append(float((one - two).detach().abs().max()) if two.numel() else 0.0)
    dist.barrier()
    return found


def test_ranks_that_share_batches_in_pairs(tmp_path):
    for errors in all_good(run_ranks(batches_of_their_own, 4, tmp_path)):
        assert len(errors) == 9
        assert max(errors) < 1e-4


def hands_over_to_megamoe(rank: int) -> list[tuple[Any, ...]]:
    """What the kernel's function is called with: this rank's rows, global ids, and the group."""
    from types import SimpleNamespace

    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import EPImplementationInterface

    rx.register_with_transformers()
    mesh = init_device_mesh("cpu", (2,))
    calls: list[tuple[Any, ...]] = []

    class Experts(torch.nn.Module):
        num_experts = 4
        config = SimpleNamespace(_experts_implementation="routed_experts_deepgemm_megamoe")

        def forward(self, x: Any, index: Any, weights: Any, process_group: Any = None) -> Any:
            calls.append((x.shape[0], index.tolist(), process_group is mesh.get_group()))
            return 2 * x

    x = torch.arange(5.0)[:, None].expand(5, 3)
    index = torch.tensor([[7, 0]] * 5)
    out = EPImplementationInterface()["routed_experts"](Experts(), mesh, mesh)(x, index, torch.ones(5, 2))
    assert torch.equal(out, 2 * x)
    return calls


def test_megamoe_gets_global_ids_and_the_group(tmp_path):
    first, second = all_good(run_ranks(hands_over_to_megamoe, 2, tmp_path))
    assert first == [(3, [[7, 0]] * 3, True)]
    assert second == [(2, [[7, 0]] * 2, True)]


def test_the_name_comes_and_goes():
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

    assert "routed_experts" not in EPImplementationInterface()
    rx.register_with_transformers()
    try:
        rx.register_with_transformers(replace=True)
        assert issubclass(EPImplementationInterface()["routed_experts"], EPImplementation)
    finally:
        rx.unregister_from_transformers()
    assert "routed_experts" not in EPImplementationInterface()
