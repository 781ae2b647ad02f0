"""Tiles of kernels: what is tried, what is kept, and when a call runs with it. The timer is a fake one."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import routed_experts as rx
from routed_experts.backends import fused as backend
from routed_experts.backends.spec import Spec
from routed_experts.bench import inputs, timing
from routed_experts.bench.shapes import Shape
from routed_experts.cli import main
from routed_experts.problem import bucket
from routed_experts.tuning import profile, store, tiles, trials
from routed_experts.tuning.keys import canonical
from routed_experts.tuning.measure import Layer
from routed_experts.tuning.tiles import Record, Trial, tiles_at

pytest.importorskip("triton", reason="Triton is not installed")

from routed_experts.kernels import alternatives, choice, fused
from routed_experts.kernels.configs import Config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interprets on the CPU")

NAME = "fused_interpreted"
SHAPE = Shape(4, 2, 64, 32)
TINY = ("--shape", "4,2,64,32", "--device", "cpu", "--dtypes", "float32", "--only", "tiles")
FASTER = (Config(16, 64, 32, 4, 2), Config(16, 32, 32, 4, 2))
SLOWER = (Config(16, 32, 32, 4, 3), Config(16, 64, 32, 4, 3))


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and the CUDA row of `fused` on CPU tensors under a name of its own."""
    monkeypatch.setenv("ROUTED_EXPERTS_CACHE", str(tmp_path / "cache"))
    row = backend.BACKEND.rows[0][0]
    requires = tuple(one for one in row.requires if one["kind"] in ("dtype", "unquantized"))
    rx.register_backend(NAME, backend.run, spec=Spec(name=NAME, takes="routing", gives="tokens", requires=requires))
    profile.forget_profile()
    yield tmp_path / "cache"
    rx.unregister_backend(NAME)
    monkeypatch.setenv("ROUTED_EXPERTS_CACHE", os.devnull)
    profile.forget_profile()


@pytest.fixture
def timer(monkeypatch):
    """A timer that runs every pass once, and says of tiles what the test says; 100 us of others."""
    us: dict[tiles.Tiles, float] = {}
    timed: list[list[str]] = []

    def medians(passes, calls, device, seconds):
        timed.append(list(passes))
        for run in passes.values():
            run()
        named = {trials._label(one): value for one, value in us.items()}
        return {name: named.get(name, 100.0) for name in passes}

    monkeypatch.setattr(timing, "medians", medians)
    monkeypatch.setattr(trials, "_BATCH", 3)
    medians.us, medians.timed = us, timed
    return medians


@pytest.fixture
def few(monkeypatch):
    """A search with a handful of candidates, whose interpreted calls take no time."""
    monkeypatch.setattr(alternatives, "_regimes", lambda call: iter([FASTER, SLOWER]))
    monkeypatch.setattr(alternatives, "_beside", lambda call, best: iter(()))


@pytest.fixture
def ran(monkeypatch):
    """The tiles that calls run with."""
    found = []
    original = fused.launches_of
    monkeypatch.setattr(
        fused, "launches_of", lambda *a: found.append((a[1].up._replace(), a[1].down._replace())) or original(*a)
    )
    return found


def make_layer(shape=SHAPE, dtype=torch.float32, fmt="none"):
    module = inputs.Experts(shape, dtype, "cpu")
    weights = rx.ExpertWeights(gate_up_proj=module.gate_up_proj, down_proj=module.down_proj)
    return Layer("tiny", shape, inputs.quantized(weights, fmt), dtype)


def default_of(layer, tokens=4):
    return trials.Search(layer, tokens, None).call.tiles


def keep(folder, layer, ratio=0.8, tokens=4, low=2, high=8, found=FASTER, key=None):
    """Write that tiles were measured as so much of the built-in ones' time."""
    folder.mkdir(exist_ok=True, parents=True)
    default, key = default_of(layer, tokens), key or trials.key_of_tiles(layer)
    record = Record(100.0, default, {default: Trial(1.0, low, high), found: Trial(ratio, low, high)})
    assert store.merge(folder, {}, {canonical(key): (key, {tokens: record})}) is None
    profile.forget_profile()


def call(layer, tokens=4, weights=None):
    one = layer.draw(tokens)
    return rx.run_experts(*one, weights or layer.weights, backend=NAME)


def decision(layer, tokens=4, **how):
    asked = rx.select_backend(layer.weights, num_tokens=tokens, num_top_k=2, backend=NAME, **how)
    return next(one for one in asked.decisions if one.backend == NAME)


class TestTheCall:
    def test_runs_with_measured_tiles_and_gives_the_same(self, cache, ran):
        layer = make_layer()
        before = call(layer)
        assert ran == [default_of(layer)]
        keep(cache, layer)
        after = call(layer)
        assert ran[1:] == [FASTER]
        assert torch.allclose(after, before, atol=1e-5)

    def test_plans_of_before_do_not_outlive_the_measurement(self, cache):
        layer = make_layer()
        x, ids, weights = layer.draw(4)
        before = fused._key(x, ids, weights)
        keep(cache, layer)
        assert fused._key(x, ids, weights) != before

    def test_outside_of_what_was_measured_it_runs_as_ever(self, cache, ran):
        layer = make_layer()
        keep(cache, layer, low=2, high=6)
        for tokens, wanted in ((1, default_of(layer, 1)), (2, FASTER), (6, FASTER), (7, default_of(layer, 7))):
            call(layer, tokens)
            assert ran.pop() == wanted

    @pytest.mark.parametrize("ratio", [0.98, 1.0, 1.2])
    def test_noise_is_no_gain(self, cache, ran, ratio):
        layer = make_layer()
        keep(cache, layer, ratio=ratio)
        call(layer)
        assert ran == [default_of(layer)]

    @pytest.mark.parametrize("part", ["device", "versions", "layer", "state"])
    def test_what_was_measured_of_something_else_is_not_used(self, cache, ran, part):
        layer = make_layer()
        key = trials.key_of_tiles(layer)
        other = "eager" if part == "state" else {**key[part], next(iter(key[part])): "another"}
        keep(cache, layer, key={**key, part: other})
        call(layer)
        assert ran == [default_of(layer)]
        keep(cache, layer)
        call(layer)
        assert ran[1:] == [FASTER]

    def test_another_layer_dtype_or_top_k_is_something_else(self, cache, ran):
        layer = make_layer()
        keep(cache, layer)
        for other in (
            make_layer(Shape(4, 2, 64, 48)),
            make_layer(dtype=torch.bfloat16),
            make_layer(Shape(4, 1, 64, 32)),
        ):
            call(other)
            assert ran.pop() == default_of(other)

    def test_an_answer_is_asked_for_once(self, cache, monkeypatch):
        from routed_experts.kernels import tuned

        layer = make_layer()
        keep(cache, layer)
        asked = []
        monkeypatch.setattr(tuned, "measured_tiles", lambda *given: asked.append(given))
        sizes = choice.Sizes(4, 2, 4, 64, 32)
        for _ in range(3):
            tuned.tiles_of(layer.weights, sizes, torch.float32, torch.device("cpu"))
        assert len(asked) == 1

    def test_gradients_run_with_the_built_in_tiles(self, cache, ran):
        """Tiles of a forward that are kept for its backward must be those that the backward chooses."""
        layer = make_layer()
        keep(cache, layer)
        x, ids, weights = layer.draw(4)
        rx.run_experts(x.requires_grad_(), ids, weights, layer.weights, backend=NAME).sum().backward()
        assert ran == []
        assert decision(layer, training=True).tiles == "default"

    def test_quantized_experts_too(self, cache, ran):
        layer = make_layer(Shape(4, 2, 128, 128), torch.bfloat16, "fp8_block")
        found = (Config(16, 64, 64, 4, 2), Config(16, 64, 64, 4, 2))
        one = layer.draw(4)
        before = fused.run_fused(layer.weights, *one)
        keep(cache, layer, found=found)
        after = fused.run_fused(layer.weights, *one)
        assert ran[-1] == found
        assert torch.allclose(after.float(), before.float(), atol=0.1)

    def test_survives_a_restart(self, cache):
        keep(cache, make_layer())
        script = textwrap.dedent("""
            import sys
            sys.path.insert(0, sys.argv[1])
            import test_tuning_configs as here
            layer = here.make_layer()
            sizes = here.choice.Sizes(4, 2, 4, 64, 32)
            from routed_experts.kernels.tuned import tiles_of
            print(tiles_of(layer.weights, sizes, here.torch.float32, layer.device) == here.FASTER)
        """)
        command = [sys.executable, "-c", script, str(Path(__file__).parent)]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.strip() == "True"


class TestTheExplanation:
    def test_says_whose_tiles_a_call_runs_with(self, cache):
        layer = make_layer()
        assert decision(layer).tiles == "default"
        keep(cache, layer)
        assert decision(layer).tiles == "tuned"
        assert decision(layer, tokens=9).tiles == "default"
        assert "tuned tiles" in str(decision(layer))
        assert decision(layer, facts=rx.current_facts("cpu").replace(torch="1.0")).tiles == "default"

    def test_says_nothing_of_backends_without_any(self, cache):
        keep(cache, make_layer())
        asked = rx.select_backend(make_layer().weights, num_tokens=4, num_top_k=2)
        assert {one.tiles for one in asked.decisions if one.backend != NAME} == {None}

    def test_select_prints_it(self, cache):
        keep(cache, make_layer())
        asked = ("select", "--shape", "4,2,64,32", "--device", "cpu", "--dtype", "float32", "--tokens", "4")
        (line,) = [one for one in invoke(*asked, "--explain").stdout.splitlines() if NAME in one]
        assert "tuned tiles" in line
        assert "tuned tiles" in " ".join(invoke(*asked).stdout.split())


class TestTheSearch:
    def test_the_faster_tiles_win_and_are_used(self, cache, timer, few, ran):
        layer = make_layer()
        timer.us[FASTER] = 80.0
        found = trials.Search(layer, 4, None)
        cache.mkdir()
        assert found.step(cache)
        assert not found.step(cache)
        assert found.record.best() == FASTER
        # Each batch has the built-in tiles in it, and what seems best is timed once more beside them.
        default = trials._label(default_of(layer))
        assert [default in names for names in timer.timed] == [True, True]
        assert timer.timed[1] == [default, trials._label(FASTER)]
        ran.clear()
        profile.forget_profile()
        call(layer)
        assert ran == [FASTER]

    def test_a_gain_that_is_not_there_twice_is_none(self, cache, timer, few, monkeypatch):
        timer.us[FASTER] = 80.0
        once = timing.medians
        answers = iter([80.0, 99.0])

        def medians(*given):
            timer.us[FASTER] = next(answers)
            return once(*given)

        monkeypatch.setattr(timing, "medians", medians)
        found = trials.Search(make_layer(), 4, None)
        cache.mkdir()
        found.step(cache)
        assert found.record.trials[FASTER].ratio == pytest.approx(0.99)
        assert found.record.best() == found.call.tiles

    def test_a_wrong_result_has_no_ratio(self, cache, timer, few, monkeypatch):
        timer.us[FASTER] = 1.0
        right = fused.run_choice
        monkeypatch.setattr(
            fused, "run_choice", lambda w, c, *given: right(w, c, *given) * (1.01 if (c.up, c.down) == FASTER else 1)
        )
        found = trials.Search(make_layer(), 4, None)
        cache.mkdir()
        found.step(cache)
        assert found.record.trials[FASTER] == Trial(None, why="WrongAnswer")
        assert found.record.best() == found.call.tiles
        assert found.to_dict()["skipped"] == {"WrongAnswer": 1}

    @pytest.mark.parametrize("where", ["compile_only", "launch"])
    def test_what_fails_is_skipped_and_counted(self, cache, timer, few, monkeypatch, where):
        import triton

        from routed_experts.kernels import launch

        owner = launch if where == "compile_only" else fused
        right = getattr(owner, where)

        def fail(one):
            if one.constants.get("BLOCK_N") == FASTER[0].columns and one.num_stages == FASTER[0].stages:
                raise triton.OutOfResources(2, 1, "shared memory")
            return right(one)

        monkeypatch.setattr(owner, where, fail)
        found = trials.Search(make_layer(), 4, None)
        cache.mkdir()
        found.step(cache)
        assert found.to_dict()["skipped"] == {"OutOfResources": 1}
        assert found.record.trials[SLOWER].ratio == 1.0

    def test_all_are_compiled_before_one_is_timed(self, cache, timer, few, monkeypatch):
        from routed_experts.kernels import launch

        events = []
        compiled, once = launch.compile_only, timing.medians
        monkeypatch.setattr(launch, "compile_only", lambda one: events.append("compile") or compiled(one))
        monkeypatch.setattr(timing, "medians", lambda *given: events.append("time") or once(*given))
        cache.mkdir()
        trials.Search(make_layer(), 4, None).step(cache)
        assert events.count("compile") >= 4
        assert "compile" not in events[events.index("time") :]

    def test_tiles_without_room_are_not_run(self, cache, timer, few, monkeypatch):
        monkeypatch.setattr(fused, "limits", lambda device: choice.Device((9, 0), 40000))
        huge = (FASTER[0]._replace(depth=128, stages=6), FASTER[1])
        monkeypatch.setattr(alternatives, "_regimes", lambda call: iter([huge, FASTER]))
        found = trials.Search(make_layer(), 4, None)
        cache.mkdir()
        found.step(cache)
        assert found.record.trials[huge].why == "more shared memory than a block may have"
        assert trials._label(huge) not in timer.timed[0]

    def test_goes_on_where_it_was(self, cache, timer):
        layer = make_layer()
        cache.mkdir()
        first = trials.Search(layer, 4, None)
        first.step(cache)
        second = trials.Search(layer, 4, store.read_all(cache / "profile.json"))
        assert second.record == first.record
        assert not set(second.left()) & set(first.record.trials)
        second.step(cache)
        kept = store.read_all(cache / "profile.json").tiles[canonical(first.key)][1][4]
        assert kept.trials == second.record.trials
        assert len(kept.trials) == 6

    @pytest.mark.parametrize("tokens", [1, 32, 512, 4096, 16384])
    @pytest.mark.parametrize("fmt", ["none", "fp8_block", "mxfp4"])
    def test_what_is_tried_in_every_regime(self, tokens, fmt):
        """A search that follows its best never ends in tiles that no file may hold, and ends."""
        experts = make_layer(Shape(8, 2, 256, 256), torch.bfloat16, fmt).weights
        sizes = choice.Sizes(tokens, 2, 8, 256, 256)
        asked = alternatives.Call(experts, sizes, torch.bfloat16, choice.Device((9, 0), 232448))
        ratios: dict = {}
        while found := list(alternatives.in_order(asked, ratios)):
            assert ratios or (found[0] == asked.tiles and asked.choice(found[0]) == asked.default)
            ratios |= {one: 1.0 + 0.01 * len(ratios) for one in found}
        assert 10 < len(ratios) < 60
        assert all(up.rows == down.rows and tiles.is_valid(up) and tiles.is_valid(down) for up, down in ratios)
        for one in ratios:
            low, high = asked.reach(one)
            assert tokens / 2 <= low <= tokens <= high <= bucket(2 * tokens)
            assert asked.choice(one).is_sorted == asked.choice(one, tokens=high).is_sorted

    def test_a_reach_ends_where_the_regime_does(self):
        experts = make_layer(Shape(8, 2, 64, 64), torch.bfloat16).weights
        asked = alternatives.Call(
            experts, choice.Sizes(32, 2, 8, 64, 64), torch.bfloat16, choice.Device((9, 0), 232448)
        )
        assert asked.reach(asked.tiles) == (17 + 3, 32)  # 64 pairs are the last unsorted; to 16 tokens rows are fewer


class TestTheFile:
    def test_survives_the_file(self, cache):
        layer = make_layer()
        keep(cache, layer)
        ((_, records),) = store.read_all(cache / "profile.json").tiles.values()
        default = default_of(layer)
        assert records == {4: Record(100.0, default, {default: Trial(1.0, 2, 8), FASTER: Trial(0.8, 2, 8)})}

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("trials", 1, "tiles", 0, 0), 17),
            (("trials", 1, "tiles", 0, 0), 32),  # rows of one product only
            (("trials", 1, "tiles", 0, 1), 1 << 20),
            (("trials", 1, "tiles", 0, 2), 32.0),
            (("trials", 1, "tiles", 0, 3), 3),
            (("trials", 1, "tiles", 0, 4), 0),
            (("trials", 1, "tiles", 0, 4), True),
            (("trials", 1, "tiles", 0, 5), 1),
            (("trials", 1, "tiles", 0), [16, 32]),
            (("trials", 1, "ratio"), -1),
            (("trials", 1, "ratio"), float("nan")),
            (("trials", 1, "low"), 9),
            (("trials", 1, "high"), "8"),
            (("tokens",), 0),
            (("default_us",), 0),
            (("trials",), 7),
        ],
    )
    def test_b57_values_that_are_none_are_not_used(self, cache, ran, caplog, place, value):
        layer = make_layer()
        keep(cache, layer)
        data = json.loads((cache / "profile.json").read_text())
        inner = data["tiles"][0]["records"][0]
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = value
        (cache / "profile.json").write_text(json.dumps(data))
        profile.forget_profile()
        with caplog.at_level(logging.WARNING, "routed_experts"):
            call(layer)
        assert ran == [default_of(layer)]
        assert len([one for one in caplog.records if "default figures are used" in one.message]) == 1

    def test_a_file_without_tiles_is_one_of_before(self, cache):
        cache.mkdir()
        (cache / "profile.json").write_text('{"format": 1, "entries": []}')
        assert store.read_all(cache / "profile.json") == ({}, {})

    def test_ratios_to_other_built_in_tiles_say_nothing(self):
        old = Record(1.0, SLOWER, {FASTER: Trial(0.5, 1, 9)})
        kept = {4: old}
        tiles.added(kept, {4: Record(2.0, FASTER, {FASTER: Trial(1.0, 1, 9)})})
        assert kept[4].trials == {FASTER: Trial(1.0, 1, 9)}

    def test_of_several_records_the_nearest_counts(self):
        def record(best):
            return Record(1.0, SLOWER, {SLOWER: Trial(1.0, 1, 999), best: Trial(0.5 if best != SLOWER else 1, 1, 999)})

        other = (FASTER[0]._replace(stages=4), FASTER[1])
        records = {4: record(FASTER), 16: record(other), 64: record(SLOWER)}
        found = {tokens: tiles_at(records, tokens) for tokens in (1, 7, 9, 31, 33, 999, 1000)}
        assert found == {1: FASTER, 7: FASTER, 9: other, 31: other, 33: None, 999: None, 1000: None}

    def test_times_and_tiles_leave_each_other_alone(self, cache):
        keep(cache, make_layer())
        before = store.read_all(cache / "profile.json")
        store.merge(cache, {"{}": ({}, {("a", ""): {1: 1.0}})})
        after = store.read_all(cache / "profile.json")
        assert after.tiles == before.tiles
        keep(cache, make_layer(), tokens=1, low=1, high=2)
        assert store.read(cache / "profile.json") == after.times

    def test_b57_eight_processes_write_at_once(self, cache):
        keep(cache, make_layer())
        script = textwrap.dedent("""
            import os, sys
            from pathlib import Path
            from routed_experts.kernels.configs import Config
            from routed_experts.tuning import store
            from routed_experts.tuning.tiles import Record, Trial
            folder, children = Path(sys.argv[1]), []
            default = (Config(16, 32, 32, 4, 3), Config(16, 32, 32, 4, 3))
            for number in range(8):
                child = os.fork()
                if not child:
                    for step in range(8):
                        tried = (default[0]._replace(stages=1 + step), default[1]._replace(stages=1 + number))
                        record = Record(1.0, default, {tried: Trial(1.0, 1, 1)})
                        store.merge(folder, {}, {"{}": ({}, {1: record})})
                    os._exit(0)
                children.append(child)
            sys.exit(any(os.waitpid(child, 0)[1] for child in children))
        """)
        subprocess.run([sys.executable, "-c", script, cache], timeout=120, check=True)
        found = store.read_all(cache / "profile.json").tiles
        assert len(found["{}"][1][1].trials) == 64
        assert len(found) == 2


class TestTheCommand:
    def test_finds_tiles_and_tells_their_gain(self, cache, timer, few):
        timer.us[FASTER] = 80.0
        report = json.loads(invoke("tune", *TINY, "--tokens", "4", "--json").stdout)
        (one,) = report["tiles"]
        assert (one["best"], one["ratio"], one["default_us"]) == ([list(c) for c in FASTER], 0.8, 100.0)
        assert (one["tried"], one["skipped"], one["complete"], one["changed"]) == (3, {}, True, True)
        assert report["points"] == []
        text = invoke("tune", *TINY, "--tokens", "4,40").stdout
        assert "16x64x32 w4 s2" in text
        assert "0.80 of built-in" in " ".join(text.split())
        assert "unsorted" in text
        assert "20 rows an expert" in text

    def test_nothing_is_tried_twice_unless_asked_for(self, cache, timer, few):
        assert invoke("tune", *TINY, "--tokens", "4").exit_code == 0
        before = len(timer.timed)
        report = json.loads(invoke("tune", *TINY, "--tokens", "4", "--json").stdout)
        assert len(timer.timed) == before
        assert (report["tiles"][0]["tried"], report["tiles"][0]["changed"]) == (3, False)
        invoke("tune", *TINY, "--tokens", "4", "--again")
        assert len(timer.timed) > before

    def test_times_are_measured_anew_with_other_tiles(self, cache, timer, few, monkeypatch):
        both = (*TINY[:-2], "--tokens", "1,4", "--json")
        first = json.loads(invoke("tune", *both, "--only", "times").stdout)
        assert (len(first["points"]), first["tiles"]) == (2, [])
        timer.us[FASTER] = 80.0
        few_tokens = functools.partial(dict.get, {1: False, 4: True})
        right = trials.Search.step
        monkeypatch.setattr(trials.Search, "step", lambda self, folder: few_tokens(self.tokens) and right(self, folder))
        second = json.loads(invoke("tune", *both).stdout)
        assert [one["changed"] for one in second["tiles"]] == [False, True]
        assert ([point["tokens"] for point in second["points"]], second["known"]) == ([4], 1)

    def test_a_budget_that_ends_is_told(self, cache, timer):
        result = invoke("tune", *TINY, "--tokens", "1,4", "--budget", "0.001")
        assert result.exit_code == 0, result.output
        assert "2 searches for tiles have more to try, and the same command goes on" in result.stdout
        assert len(timer.timed) == 1

    def test_one_search_that_fails_does_not_end_the_others(self, cache, timer, few, monkeypatch):
        right = trials.Search

        def fail(layer, tokens, known):
            if tokens == 4:
                raise RuntimeError("no such thing")
            return right(layer, tokens, known)

        monkeypatch.setattr(trials, "Search", fail)
        report = json.loads(invoke("tune", *TINY, "--tokens", "1,4", "--json").stdout)
        assert [one["tokens"] for one in report["tiles"]] == [1]
        assert "RuntimeError: no such thing" in report["notes"][0]

    def test_without_a_kernel_that_has_tiles_it_says_so(self, cache):
        rx.unregister_backend(NAME)
        try:
            result = invoke("tune", *TINY, "--tokens", "4")
        finally:
            rx.register_backend(NAME, backend.run)
        assert result.exit_code == 0, result.output
        assert "tiles are not tuned on cpu: block sizes of the Rust kernels are fixed" in result.stdout

    def test_export_and_import_bring_them_along(self, cache, tmp_path, monkeypatch):
        keep(cache, make_layer())
        assert invoke("tune", "--export", tmp_path / "out.json").exit_code == 0
        monkeypatch.setenv("ROUTED_EXPERTS_CACHE", str(tmp_path / "other"))
        profile.forget_profile()
        assert decision(make_layer()).tiles == "default"
        result = invoke("tune", "--import", tmp_path / "out.json")
        assert "1 layers' tiles" in result.stdout
        assert store.read_all(tmp_path / "other" / "profile.json") == store.read_all(cache / "profile.json")
        assert decision(make_layer()).tiles == "tuned"

    def test_ctrl_c_keeps_what_was_measured(self, cache):
        script = textwrap.dedent("""
            import sys
            sys.path.insert(0, sys.argv[1])
            import test_tuning_configs as here
            here.trials._BATCH = 2
            here.rx.register_backend(here.NAME, here.backend.run, spec=here.Spec(name=here.NAME, takes="routing"))
            here.main(["tune", *here.TINY, "--tokens", "1,4", "--budget", "300"])
        """)
        # What a shell starts in the background ignores the signal, and so does all that it starts.
        heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        command = [sys.executable, "-c", script, str(Path(__file__).parent)]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
        end = time.monotonic() + 60
        while not (cache / "profile.json").exists() or not store.read_all(cache / "profile.json").tiles:
            assert time.monotonic() < end
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
        assert running.returncode == 130, out + err
        assert "Traceback" not in out + err
        assert "interrupted: what was measured is kept, and the same command goes on" in out
        ((_, records),) = store.read_all(cache / "profile.json").tiles.values()
        assert len(records[1].trials) >= 2


def test_facts_of_another_device_are_another_key():
    layer = make_layer()
    mine = trials.key_of_tiles(layer)
    layer.facts = dataclasses.replace(layer.facts, torch="2.0")
    assert trials.key_of_tiles(layer) != mine
