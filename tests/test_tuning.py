"""Measured times: what they are of, how far they reach, how they are kept, and what ``auto`` makes of them."""

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
import timeit
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from selection_helpers import machine, make_experts, quantized

import routed_experts as rx
from routed_experts.cli import main
from routed_experts.selection import as_problem, choose, select_backend
from routed_experts.tuning import profile, store
from routed_experts.tuning.keys import canonical, key_of
from routed_experts.tuning.measure import spread

TINY = ("--shape", "4,2,32,16", "--device", "cpu", "--dtypes", "float32")
CPU = rx.Facts(device="cpu", torch="2.13.0", python="3.12.1")


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and a process that has read no file."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ROUTED_EXPERTS_CACHE", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    profile.forget_profile()
    yield folder
    monkeypatch.setenv("ROUTED_EXPERTS_CACHE", os.devnull)
    profile.forget_profile()


def key(experts=None, facts=CPU, tokens=8, top_k=2, dtype=torch.bfloat16, **how):
    return key_of(facts, as_problem(experts or make_experts(), tokens, top_k, dtype, **how))


def keep(folder, times, **what):
    """Write times of (backend, path) by T under the key of a call on ``make_experts``."""
    folder.mkdir(exist_ok=True, parents=True)
    of = key(**what)
    assert store.merge(folder, {canonical(of): (of, times)}) is None
    profile.forget_profile()


def us(selection):
    return {one.backend: (one.predicted_us, one.tuned) for one in selection.decisions if one.accepted}


def ask(tokens, **how):
    return select_backend(make_experts(), num_tokens=tokens, num_top_k=2, facts=CPU, **how)


class TestTheChoice:
    def test_b67_inside_the_range_outside_of_it_and_in_another_process(self, cache):
        default = ask(8)
        assert not any(one.tuned for one in default.decisions)
        keep(cache, {("eager", ""): {4: 1.0, 16: 4.0}})
        chosen = ask(8)
        assert (chosen.name, us(chosen)["eager"]) == ("eager", (pytest.approx(2.0), True))
        assert us(ask(4))["eager"] == (1.0, True)
        assert us(ask(16))["eager"] == (4.0, True)
        for outside in (1, 3, 20, 4096):
            assert ask(outside).name != "eager"
            assert not us(ask(outside))["eager"][1]
        assert us(ask(8))["grouped_mm"] == us(default)["grouped_mm"]

    def test_b67_what_tune_writes_is_what_a_new_process_reads(self, cache):
        result = invoke("tune", *TINY, "--tokens", "1,8", "--budget", "60", "--json")
        assert result.exit_code == 0, result.output
        script = textwrap.dedent("""
            import json, torch, routed_experts as rx
            up, down = torch.empty(4, 32, 32, device="meta"), torch.empty(4, 32, 16, device="meta")
            experts = rx.ExpertWeights(gate_up_proj=up, down_proj=down)
            ask = lambda tokens: rx.select_backend(experts, num_tokens=tokens, num_top_k=2, device="cpu").decisions
            print(json.dumps({t: [one.backend for one in ask(t) if one.tuned] for t in (1, 5, 8, 9)}))
        """)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        tuned = {tokens: set(names) for tokens, names in json.loads(done.stdout).items()}
        assert {"eager", "grouped_mm", "fused"} <= tuned["1"] & tuned["8"] & tuned["5"]
        assert not tuned["9"]

    def test_a_wide_gap_is_not_bridged(self, cache):
        keep(cache, {("eager", ""): {1: 1.0, 17: 1.0}})
        assert not us(ask(4))["eager"][1]
        assert us(ask(1))["eager"][1]

    def test_a_time_makes_a_row_known_but_never_allowed(self, cache):
        keep(cache, {("deepgemm", ""): {8: 0.1}, ("nobody", ""): {8: 0.1}})
        chosen = ask(8)
        assert chosen.name not in ("deepgemm", "nobody")
        refused = next(one for one in chosen.decisions if one.backend == "deepgemm")
        assert (refused.accepted, refused.predicted_us, refused.tuned) == (False, None, False)

    def test_explain_says_whose_figures_they_are(self, cache):
        keep(cache, {("eager", ""): {8: 1.0}})
        text = ask(8).explain()
        assert "predicted 1.0 us (tuned figures)" in text
        assert "(default figures)" in text

    def test_a_choice_that_was_kept_is_made_anew_after_tuning(self, cache):
        experts = make_experts()
        before = choose(experts, 8, 2, torch.bfloat16).name
        assert before != "eager"
        keep(cache, {("eager", ""): {8: 0.5}}, facts=rx.facts.facts_for(torch.device("cpu")))
        assert choose(experts, 8, 2, torch.bfloat16).name == "eager"

    def test_a_kept_choice_stays_cheap(self, cache):
        keep(cache, {("eager", ""): {8: 0.5}}, facts=rx.facts.facts_for(torch.device("cpu")))
        experts = make_experts()
        choose(experts, 8, 2, torch.bfloat16)
        once = min(timeit.repeat(lambda: choose(experts, 8, 2, torch.bfloat16), number=500, repeat=20)) / 500
        assert once < 5e-6

    def test_the_file_is_read_once(self, cache, monkeypatch):
        keep(cache, {("eager", ""): {8: 1.0}})
        reads = []
        read = store.read_all
        monkeypatch.setattr(store, "read_all", lambda file: reads.append(file) or read(file))
        for _ in range(3):
            ask(8)
            choose(make_experts(), 9, 2, torch.bfloat16)
        assert reads == [cache / "profile.json"]

    def test_importing_reads_nothing(self, cache):
        keep(cache, {("eager", ""): {8: 1.0}})
        (cache / "profile.json").write_text("broken")
        script = "import routed_experts; from routed_experts.tuning import profile; assert profile._entries is None"
        subprocess.run([sys.executable, "-W", "error", "-c", script], timeout=60, check=True)


class TestKeys:
    @pytest.mark.parametrize(
        "other",
        [
            {"experts": make_experts(num_experts=16)},
            {"experts": make_experts(hidden_size=512)},
            {"experts": make_experts(intermediate_size=64)},
            {"experts": make_experts(is_transposed=True)},
            {"experts": make_experts(has_bias=True)},
            {"experts": make_experts(quantization=quantized("fp8_block", torch.float32))},
            {"top_k": 4},
            {"dtype": torch.float32},
            {"capturing": True},
            {"facts": dataclasses.replace(CPU, torch="2.12.0")},
            {"facts": machine()},
        ],
    )
    def test_another_call_has_another_key(self, other):
        assert canonical(key(**other)) != canonical(key())

    def test_gpus_and_threads_are_told_apart(self, monkeypatch):
        found = {canonical(key(facts=machine(device_name=name))) for name in ("NVIDIA H100", "NVIDIA H200")}
        found.add(canonical(key(facts=machine(packages={"triton": "3.5.0"}))))
        before = canonical(key())
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        assert len(found) == 3
        assert canonical(key()) != before

    def test_the_number_of_tokens_is_no_part_of_it(self):
        assert key(tokens=1) == key(tokens=4096)

    def test_calls_that_are_not_measured_have_none(self, cache):
        keep(cache, {("eager", ""): {8: 1.0}})
        assert not any(one.tuned for one in ask(8, training=True).decisions)
        assert not any(one.tuned for one in ask(8, expert_parallel=True).decisions)
        assert us(ask(8, compiling=True))["eager"][1]

    def test_a_key_survives_the_file(self, cache):
        experts = make_experts(quantization=quantized("fp8_block", torch.float32))
        of = key(experts)
        keep(cache, {("eager", ""): {8: 1.0}}, experts=experts)
        assert list(store.read(cache / "profile.json")) == [canonical(of)]


class TestTheFile:
    def test_newer_times_replace_older_ones_and_others_stay(self, cache):
        keep(cache, {("eager", ""): {1: 1.0, 2: 2.0}, ("fused", "rust"): {1: 3.0}})
        keep(cache, {("eager", ""): {2: 20.0, 4: 4.0}})
        ((_, times),) = store.read(cache / "profile.json").values()
        assert times == {("eager", ""): {1: 1.0, 2: 20.0, 4: 4.0}, ("fused", "rust"): {1: 3.0}}
        assert sorted(file.name for file in cache.iterdir()) == ["profile.json", "profile.json.lock"]

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"[]",
            b'{"format": 99, "entries": []}',
            b'{"format": 1, "entries": [{"key": {}, "rows": [{"backend": "a", "path": "", "us": {"1": -3}}]}]}',
            b'{"format": 1, "entries": [{"key": {}, "rows": [{"backend": "a", "path": "", "us": {"1": NaN}}]}]}',
            b'{"format": 1, "entries": [7]}',
            b"\xff\xfe",
        ],
    )
    def test_b57_a_damaged_file_is_no_error_and_is_made_anew(self, cache, content, caplog):
        default = ask(8).to_dict()
        cache.mkdir()
        (cache / "profile.json").write_bytes(content)
        profile.forget_profile()
        with caplog.at_level(logging.WARNING, "routed_experts"):
            assert ask(8).to_dict() == default
            ask(9)
        assert len([record for record in caplog.records if "default figures" in record.message]) == 1
        result = invoke("tune", *TINY, "--tokens", "1")
        assert result.exit_code == 0, result.output
        assert "set aside" in result.stdout
        assert (cache / "profile.json.broken").read_bytes() == content
        assert len(store.read(cache / "profile.json")) == 1

    def test_b57_eight_processes_and_one_cold_cache(self, cache):
        """Children of one process that has imported everything, so that they meet at the file."""
        script = textwrap.dedent("""
            import os, sys
            from routed_experts.cli import main
            import routed_experts.tuning.measure, routed_experts.cli.progress
            children = []
            for number in range(1, 9):
                child = os.fork()
                if not child:
                    argv = ["tune", "--shape", "4,2,32,16", "--device", "cpu", "--dtypes", "float32", "--json"]
                    argv += ["--tokens", f"{number},{number + 8}", "--budget", "60"]
                    sys.stdout = open(os.devnull, "w")
                    try:
                        main(argv, standalone_mode=False)
                    except BaseException as error:
                        print(number, repr(error), file=sys.stderr)
                        os._exit(1)
                    os._exit(0)
                children.append(child)
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            sys.exit(str(codes) if any(codes) else 0)
        """)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        ((_, times),) = store.read(cache / "profile.json").values()
        assert set(times["eager", ""]) == set(range(1, 17))
        assert sorted(file.name for file in cache.iterdir()) == ["profile.json", "profile.json.lock"]

    def test_writers_take_turns(self, cache):
        """Many small additions of processes that do nothing else."""
        keep(cache, {("eager", ""): {1: 1.0}})
        script = textwrap.dedent("""
            import os, sys
            from pathlib import Path
            from routed_experts.tuning import store
            folder, children = Path(sys.argv[1]), []
            for number in range(8):
                child = os.fork()
                if not child:
                    for step in range(8):
                        store.merge(folder, {"{}": ({}, {("a", ""): {1 + number * 8 + step: 1.0}})})
                    os._exit(0)
                children.append(child)
            sys.exit(any(os.waitpid(child, 0)[1] for child in children))
        """)
        subprocess.run([sys.executable, "-c", script, cache], timeout=120, check=True)
        assert len(store.read(cache / "profile.json")["{}"][1]["a", ""]) == 64

    def test_a_stop_while_writing_leaves_the_old_file(self, cache, monkeypatch):
        keep(cache, {("eager", ""): {1: 1.0}})
        before = (cache / "profile.json").read_bytes()
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.merge(cache, {"{}": ({}, {})})
        assert (cache / "profile.json").read_bytes() == before
        assert sorted(file.name for file in cache.iterdir()) == ["profile.json", "profile.json.lock"]

    @pytest.mark.parametrize("home", ["/proc", "/dev/null"])
    def test_a_home_that_cannot_be_written(self, home, monkeypatch, tmp_path):
        monkeypatch.delenv("ROUTED_EXPERTS_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", home)
        result = invoke("tune", *TINY, "--tokens", "1")
        assert result.exit_code == 0, result.output
        assert f"note: cannot write in {home}/.cache/routed-experts" in result.stdout
        assert result.stdout.count("note:") == 1
        (file,) = (tmp_path / "temporary").glob("routed-experts-*/profile.json")
        assert file.parent.stat().st_mode & 0o777 == 0o700
        # And it is found again.
        assert store.find() == file

    def test_a_folder_of_somebody_else_is_not_believed(self, monkeypatch, tmp_path):
        monkeypatch.setenv("ROUTED_EXPERTS_CACHE", "/proc/nothing")
        strange = tmp_path / "temporary" / f"routed-experts-{os.getuid()}"
        strange.mkdir()
        store.write(strange / "profile.json", {})
        assert store.find() == strange / "profile.json"
        mine = os.getuid
        monkeypatch.setattr(store, "folders", lambda: [Path("/proc/nothing"), strange])
        monkeypatch.setattr(os, "getuid", lambda: mine() + 1)
        assert store.find() is None
        with pytest.raises(PermissionError):
            store.writable_folder()


class TestTheCommand:
    def test_points_are_kept_and_not_measured_twice(self, cache):
        first = json.loads(invoke("tune", *TINY, "--tokens", "1,4", "--json").stdout)
        assert (first["planned"], first["known"], first["left"]) == (2, 0, 0)
        for point in first["points"]:
            assert {"eager", "batched_mm", "grouped_mm (loop)", "fused (rust)"} <= set(point["us"])
            assert point["failed"] == {}
        second = json.loads(invoke("tune", *TINY, "--tokens", "1,4,8", "--json").stdout)
        assert (second["known"], [point["tokens"] for point in second["points"]]) == (2, [8])
        again = json.loads(invoke("tune", *TINY, "--tokens", "1,4", "--again", "--json").stdout)
        assert len(again["points"]) == 2

    def test_a_budget_that_ends_leaves_the_rest_for_later(self, cache):
        result = invoke("tune", *TINY, "--tokens", "1,2,4,8", "--budget", "0.001")
        assert result.exit_code == 0, result.output
        assert "the budget is spent: 3 points are left" in result.stdout
        result = invoke("tune", *TINY, "--tokens", "1,2,4,8")
        assert "3 points measured, 1 known before, of 4" in result.stdout

    def test_ctrl_c_loses_nothing_and_says_so(self, cache):
        arguments = [*TINY, "--tokens", ",".join(map(str, range(1, 200))), "--budget", "100"]
        command = [sys.executable, "-m", "routed_experts.cli", "tune", *arguments]
        # What a shell starts in the background ignores the signal, and so does all that it starts.
        heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
        end = time.monotonic() + 60
        while not (cache / "profile.json").exists() or len(next(iter(_points(cache)), ())) < 2:
            assert time.monotonic() < end
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
        assert running.returncode == 130
        assert "Traceback" not in out + err
        assert "interrupted:" in out
        assert "the same command goes on" in out
        measured = int(out.split(" points measured")[0].split()[-1])
        (kept,) = _points(cache)
        assert len(kept) >= measured >= 2

    @pytest.mark.parametrize("command", ["tune", "bench", "warmup"])
    @pytest.mark.parametrize("text", ["0", "1,x", "-3", ","])
    def test_token_counts_that_are_none(self, command, text):
        done = invoke(command, "--tokens", text)
        assert done.exit_code == 2
        assert "--tokens takes whole numbers above 0" in done.output

    def test_a_wrong_row_has_no_time(self, cache, monkeypatch):
        from routed_experts.backends import eager

        right = eager.run
        monkeypatch.setattr(eager, "run", lambda *given: right(*given) * 1.01)
        spec = dataclasses.replace(eager.BACKEND.rows[0][0], name="wrong")
        rx.register_backend("wrong", eager.run, spec=spec)
        try:
            report = json.loads(invoke("tune", *TINY, "--tokens", "2", "--json").stdout)
        finally:
            rx.unregister_backend("wrong")
        (point,) = report["points"]
        assert set(point["failed"]) == {"wrong"}
        assert "WrongAnswer" in point["failed"]["wrong"]
        assert "wrong" not in point["us"]
        ((_, times),) = store.read(cache / "profile.json").values()
        assert ("wrong", "") not in times

    def test_export_and_import(self, cache, tmp_path, monkeypatch):
        assert invoke("tune", *TINY, "--tokens", "1").exit_code == 0
        assert invoke("tune", "--export", tmp_path / "out.json").exit_code == 0
        monkeypatch.setenv("ROUTED_EXPERTS_CACHE", str(tmp_path / "other"))
        result = invoke("tune", "--import", tmp_path / "out.json")
        assert result.exit_code == 0, result.output
        assert store.read(tmp_path / "other" / "profile.json") == store.read(cache / "profile.json")
        (tmp_path / "out.json").write_text("{}")
        result = invoke("tune", "--import", tmp_path / "out.json")
        assert result.exit_code == 1
        assert "needed: a file that tune wrote" in result.stderr

    def test_pinned_experts_run_on_their_row_whatever_is_asked_for(self):
        from routed_experts.selection import Selection, pin

        weights = rx.ExpertWeights(gate_up_proj=torch.randn(4, 32, 32), down_proj=torch.randn(4, 32, 16))
        spec = rx.Spec(name="eager", path="other")
        row = Selection("eager", "other", (), 0, "", spec, lambda experts, x, index, scores: torch.full_like(x, 7.0))
        x, index, scores = torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
        pinned = pin(weights.with_tensors(dict(weights._tensors)), row)
        for _ in range(2):
            for backend in ("eager", "grouped_mm", "auto"):
                assert rx.run_experts(x, index, scores, pinned, backend=backend).unique().tolist() == [7.0]
        assert rx.run_experts(x, index, scores, weights).unique().numel() > 1

    def test_every_row_is_measured_and_not_its_backends_best(self, cache):
        """Of grouped_mm's two ways on a CPU, each has a time of its own."""
        keep(cache, {})
        report = json.loads(invoke("tune", *TINY, "--tokens", "4", "--json").stdout)
        assert {"grouped_mm (torch)", "grouped_mm (loop)"} <= set(report["points"][0]["us"])


def _points(folder):
    return [set(times.get(("eager", ""), ())) for _, times in store.read(folder / "profile.json").values()]


@pytest.mark.parametrize(
    ("counts", "order"),
    [([8], [8]), ([1, 8], [1, 8]), ([1, 2, 3, 4, 5], [1, 5, 3, 2, 4]), ([4, 1, 4], [1, 4])],
)
def test_a_run_cut_short_covers_the_range(counts, order):
    assert spread(counts) == order
