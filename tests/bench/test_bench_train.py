"""`tigon bench train` as typed, on a small model: record, tables, charts, peers that cannot run, refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from torch._C._autograd import DeviceType

pytest.importorskip("typer")

import transformers
from transformers.models.llama import modeling_llama

from benchmarks.__main__ import main as benchmarks
from benchmarks.pages import bench as bench_page
from benchmarks.pages.bench import load, section
from benchmarks.training import codes
from benchmarks.training.codes import ALL
from benchmarks.training.table import codes as codes_table
from eager_capture import eager_capture
from tigon.bench import timing
from tigon.bench.training import table, variants
from tigon.bench.training.cases import Case
from tigon.bench.training.measure import CaseRun
from tigon.bench.training.record import CaseRecord, StepMeasurement
from tigon.bench.training.time_by_kind import KINDS, kind_of, time_by_kind
from tigon.bench.training.trainee import Trainee
from tigon.bench.training.variants import CODES, parse
from tigon.cli import app
from tigon.ops import products
from tigon.techniques.accumulation import fused_linear
from tigon.techniques.cuda_graphs import cuda_graphs

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures on the CPU")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("small")
    config.save_pretrained(folder)
    return folder


CEILINGS = {"copy_gb_per_s": 10.0, "matmul_tflop_per_s": 0.1, "matmul_size": 512}


def type_in(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(timing, "ceilings", lambda *_: CEILINGS)
    monkeypatch.setattr("sys.argv", ["tigon", "bench", *map(str, arguments)])
    try:
        app.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


@pytest.fixture
def bench(monkeypatch, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        code = type_in(monkeypatch, *arguments)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def quick(model: Path, *names: str) -> tuple[object, ...]:
    chosen = [word for name in names for word in ("--variant", name)]
    return ("train", "--model", model, "--batch", 4, "--seq", 16, "--rounds", 2, "--steps", 1, *chosen)


NAMES = ["hf:full", "tigon:none@fits", "tigon:full@2", "tigon:auto"]


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory) -> Path:
    """The record of a whole run."""
    path = tmp_path_factory.mktemp("results") / "card" / "x.json"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TIGON_COMMIT", "abc")
        assert type_in(monkeypatch, *quick(model, *NAMES), "--json", path) == 0
    return path


def test_record_has_the_figures_of_every_variant_and_their_origin(measured):
    run = load(measured)
    (case,) = run.cases
    assert run.environment["versions"]["torch"] == torch.__version__ and run.environment["date"] and run.seconds > 0
    assert (case.tigon_commit, case.tokens, case.limit_bytes) == ("abc", 64, None)
    assert case.command.startswith("tigon bench train --model ")
    assert [(m.variant, m.recomputed, m.micro_batch) for m in case.measurements] == [
        ("hf:full", "full", 4), ("tigon:none@fits", "none", 4), ("tigon:full@2", "full", 2), ("tigon:auto", "none", 4),
    ]  # fmt: skip
    for m in case.measurements:
        assert m.status == "ok" and m.step_ms is not None and m.peak_bytes and m.products_share
        assert m.tokens_per_s == pytest.approx(64_000 / m.step_ms.median)
        assert m.kinds_ms and set(m.kinds_ms) == set(KINDS) and m.kinds_ms["matmuls"] > 0
    assert not list(measured.parent.glob("*.part"))


def test_every_turn_starts_from_the_same_weights_and_all_variants_learn_the_same(measured):
    measurements = load(measured).cases[0].measurements
    expected = torch.tensor(measurements[0].losses[0])
    assert expected[0] != expected[1]
    for m in measurements:
        first, second = m.losses
        assert first == second, f"{m.variant} did not start from the same weights"
        torch.testing.assert_close(torch.tensor(first), expected, rtol=1e-5, atol=0)


def test_peer_that_is_not_installed_is_named_and_the_others_are_measured(bench, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    path = tmp_path / "x.json"
    code, out, _ = bench(*quick(model, "liger:full", "hf:none"), "--json", path)
    assert code == 0 and "| liger:full | not installed: " in out
    assert [m.status for m in load(path).cases[0].measurements] == ["not installed", "ok"]


def test_peer_without_memory_is_recorded_and_the_others_are_measured(bench, model, tmp_path, monkeypatch):
    def out_of_memory(*_: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB.")

    peer = dataclasses.replace(CODES["hf"], prepare=lambda _: variants.Ready(out_of_memory))
    monkeypatch.setitem(CODES, "hf", peer)
    path = tmp_path / "x.json"
    code, out, _ = bench(*quick(model, "hf:full", "tigon:none"), "--json", path)
    assert code == 0 and "| hf:full | out of memory: " in out
    assert [m.status for m in load(path).cases[0].measurements] == ["out of memory", "ok"]


def fake_liger(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A Liger that counts the rotations, and replaces names of the modeling module for all models, as Liger does."""
    calls: list[str] = []
    rotate = modeling_llama.apply_rotary_pos_emb

    def apply(model: object, **_: object) -> None:
        modeling_llama.apply_rotary_pos_emb = lambda *args, **kwargs: calls.append("liger") or rotate(*args, **kwargs)
        modeling_llama.LlamaMLP = type("LigerSwiGLUMLP", (torch.nn.Module,), {"forward": None})

    patch = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    patch._apply_liger_kernel_to_instance = apply
    package = types.ModuleType("liger_kernel.transformers")
    package.monkey_patch = patch
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    return calls


def test_ligers_functions_run_in_its_own_turns_only(model, monkeypatch):
    before = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaMLP
    calls = fake_liger(monkeypatch)
    case = Case(model=str(model), batch=2, seq=8, precision="fp32", memory=None)
    trainee = Trainee(case, CPU, 1)
    ready = {name: parse(name).prepare(trainee.model, "none") for name in ("liger:none", "hf:none")}
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaMLP) == before
    with ready["hf:none"].active():
        trainee.step(ready["hf:none"].loss, 0, 2)
    assert not calls
    with ready["liger:none"].active():
        trainee.step(ready["liger:none"].loss, 0, 2)
    assert calls == ["liger", "liger"], "one rotation per layer"
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaMLP) == before


def test_variants_share_the_parameters_and_nothing_else(model):
    case = Case(model=str(model), batch=2, seq=8, precision="fp32", memory=None)
    trainee = Trainee(case, CPU, 1)
    copies = []

    def keep(own):
        copies.append(own)
        return variants.Ready(lambda ids, learned: learned)

    dataclasses.replace(parse("hf:full"), code=dataclasses.replace(CODES["hf"], prepare=keep)).prepare(
        trainee.model, "full"
    )
    (own,) = copies
    assert own is not trainee.model
    assert [id(p) for p in own.parameters()] == [id(p) for p in trainee.parameters]
    assert own.lm_head.weight is own.model.embed_tokens.weight, "the head stays tied"
    assert own.model.layers[0].gradient_checkpointing and not trainee.model.model.layers[0].gradient_checkpointing


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_variants_in_graphs_learn_the_same_and_the_fused_one_adds_in_the_products(model, monkeypatch, recomputed):
    def eager_graphs(own, recomputed):
        return cuda_graphs.graph(own, recomputes=recomputed == "full", new_capture=lambda: eager_capture)

    added: list[bool] = []

    def watched(a, b, out, accumulate):
        added.append(accumulate)
        products.product_into(a, b, out, accumulate)

    monkeypatch.setattr(codes, "_graphs_of", eager_graphs)
    monkeypatch.setattr(fused_linear, "product_into", watched)
    case = Case(model=str(model), batch=4, seq=8, precision="fp32", memory=None)
    trainee, losses = Trainee(case, CPU, 2), {}
    for name in ("tigon", "tigon-graphs", "tigon-graphs-fused", "tigon-fused"):
        ready = parse(f"{name}:{recomputed}", codes=ALL).prepare(trainee.model, recomputed)
        trainee.restore()
        if "fused" not in name:
            assert not added
        with ready.active():
            losses[name] = torch.stack([trainee.step(ready.loss, number, 2) for number in range(2)])
    assert added.count(True) > 0 and added.count(False) > 0
    for name in ("tigon-graphs", "tigon-graphs-fused", "tigon-fused"):
        torch.testing.assert_close(losses[name], losses["tigon"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_variant_in_fp8_computes_nearly_the_same_loss(model, recomputed, tmp_path):
    config = transformers.AutoConfig.from_pretrained(model)
    config.num_hidden_layers = 3  # the first and the last keep their products
    config.save_pretrained(tmp_path)
    case = Case(model=str(tmp_path), batch=2, seq=8, precision="bf16", memory=None)
    trainee, losses = Trainee(case, CPU, 2), {}
    for name in ("tigon", "tigon-fp8-tensorwise", "tigon-fp8-rowwise"):
        ready = parse(f"{name}:{recomputed}", codes=ALL).prepare(trainee.model, recomputed)
        trainee.restore()
        with ready.active():
            losses[name] = trainee.step(ready.loss, 0, 2)
    for name in ("tigon-fp8-tensorwise", "tigon-fp8-rowwise"):
        torch.testing.assert_close(losses[name], losses["tigon"], rtol=0.02, atol=0)


def test_fits_is_the_largest_micro_batch_within_the_limit(bench, model, tmp_path, monkeypatch):
    monkeypatch.setattr(Case, "limit_bytes", property(lambda self: 250))
    monkeypatch.setattr(CaseRun, "_trial", lambda self, ready, micro: 100 * micro)
    path = tmp_path / "x.json"
    code, out, _ = bench(*quick(model, "hf:none@fits"), "--json", path)
    (m,) = load(path).cases[0].measurements
    assert code == 0 and m.micro_batch == 2
    # The measured peak is above 250 bytes, which the record says.
    assert m.status == "over the limit" and m.tokens_per_s and "| hf:none@fits ‡ | 2 x 2 |" in out


def test_variant_that_no_micro_batch_lets_fit_is_recorded(bench, model, tmp_path, monkeypatch):
    monkeypatch.setattr(Case, "limit_bytes", property(lambda self: 1 if self.memory else None))
    path = tmp_path / "x.json"
    code, out, _ = bench(*quick(model, "hf:none@fits", "hf:none"), "--memory", "1GiB", "--json", path)
    first, second = load(path).cases[0].measurements
    assert code == 0 and first.status == "does not fit" and "GiB at a micro-batch of 1" in first.detail
    assert second.status == "over the limit" and "| hf:none@fits | does not fit: " in out


def test_trls_head_computes_the_same_loss(model, tmp_path, monkeypatch):
    pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")
    path = tmp_path / "x.json"
    monkeypatch.setattr(timing, "ceilings", lambda *_: CEILINGS)
    benchmarks([*map(str, quick(model, "hf:full", "trl:full")), "--tiny", "--json", str(path)])
    reference, trl = load(path).cases[0].measurements
    if trl.status == "not supported":
        pytest.skip(trl.detail)
    torch.testing.assert_close(torch.tensor(trl.losses), torch.tensor(reference.losses), rtol=1e-5, atol=0)


def test_resumed_run_measures_a_case_again_only_if_it_lacks_a_variant(bench, model, measured, tmp_path):
    path = tmp_path / "x.json"
    shutil.copy(measured, path)
    kept = load(path).cases
    assert bench(*quick(model, "hf:full"), "--json", path, "--resume")[0] == 0 and load(path).cases == kept
    code, _, err = bench(*quick(model, "hf:none"), "--rounds", 1, "--json", path, "--resume")
    assert code == 2 and "has rounds 2, this run 1" in err and load(path).cases == kept
    assert bench(*quick(model, "tigon:none"), "--json", path, "--resume")[0] == 0
    (again,) = load(path).cases
    assert [m.variant for m in again.measurements] == ["tigon:none", *NAMES], "all in turns, in one process"


def test_case_left_out_by_the_time_limit_is_printed_and_recorded(bench, model, tmp_path):
    path = tmp_path / "x.json"
    code, out, _ = bench(*quick(model, "hf:none"), "--time-limit", 0, "--json", path)
    assert code == 0 and "(time limit)" in out
    assert load(path).not_run == [f"{model} 4x16 fp32 (time limit)"] and not load(path).cases


def test_nothing_is_written_if_nothing_was_measured(bench, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    path = tmp_path / "x.json"
    code, _, err = bench(*quick(model, "liger:full"), "--json", path)
    assert code == 2 and err.startswith(
        "tigon: nothing was measured, and nothing is written: liger:full: not installed"
    )
    assert len(err.splitlines()) == 1 and not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--variant", "unsloth:full"), "choose one of hf, compile, liger, tigon."),
        (("--variant", "hf"), "hf recomputes none, full; got ''"),
        (("--variant", "liger:auto"), "liger recomputes none, full; got 'auto'"),
        (("--variant", "tigon:auto@4"), "the planner chooses the micro-batch of auto; write tigon:auto"),
        (("--variant", "tigon:half:3"), "tigon recomputes none, full, auto, or layers"),
        (("--variant", "hf:full@many"), "write fits, whole or a number of samples"),
        (("--variant", "hf:full@3"), "a micro-batch of 3 does not divide --batch 4"),
        (("--without", "hf"), "--without hf: hf recomputes"),
        (("--variant", "hf:full", "--without", "hf:full"), "--without leaves no variant"),
        (("--batch", 0), "--batch 0 must be at least 1"),
        (("--seq", 4), "--seq 4 must be at least 8"),
        (("--rounds", 0), "--rounds 0 must be at least 1"),
        (("--precision", "fp8"), "choose one of bf16, amp-bf16, fp32"),
        (("--memory", "lots"), "lots"),
        (("--model", "llama-9b"), "presets are"),
        (("--resume",), "--resume requires --json FILE"),
        (("--seq", 4096), "max_position_embeddings of 2048"),
    ],
)
def test_wrong_input_is_refused_in_one_line(bench, arguments, words):
    code, _, err = bench("train", *arguments)
    assert code == 2 and len(err.splitlines()) == 1 and words in err, err


def test_unwritable_place_and_a_foreign_file_are_refused_before_measuring(bench, model, tmp_path):
    (tmp_path / "notes.json").write_text("{}")
    code, out, err = bench(*quick(model), "--json", tmp_path / "notes.json")
    assert code == 2 and "--json would write over another file" in err and "preparing" not in out
    code, out, err = bench(*quick(model), "--json", tmp_path / "notes.json" / "x.json")
    assert code == 2 and "cannot be written" in err and "preparing" not in out


def test_report_writes_tables_and_charts_and_the_section_of_a_page(measured, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plots, document = tmp_path / "plots", tmp_path / "page.md"
    document.write_text("before\n<!-- training card/x -->\nEARLIER TEXT\n<!-- end -->\nafter\n")
    benchmarks(["report", str(measured), "--plot", str(plots)])
    bench_page.main([str(measured), "--into", str(document)])
    out = capsys.readouterr().out
    assert "x hf:full" in out and "| tigon:full@2 | 2 x 2 | full |" in out
    names = {p.name for p in plots.iterdir()}
    assert "table.md" in names and sorted(name.partition("-")[0] for name in names - {"table.md"}) == ["speed", "time"]
    page = document.read_text()
    assert page.startswith("before\n") and page.endswith("after\n") and "EARLIER TEXT" not in page
    assert page.count("](img/benchmarks/card/x/") == 2
    assert len(list((tmp_path / "img/benchmarks/card/x").glob("*.svg"))) == 2


def test_docs_show_the_figures_of_the_records():
    """`python -m benchmarks.pages.bench RECORD.json --into docs/training-benchmarks.md` mends it."""
    document = (ROOT / "docs" / "training-benchmarks.md").read_text(encoding="utf-8")
    results = ROOT / "benchmarks" / "results"
    for path in sorted(results.glob("*/training/*.json")):
        name = f"training/{path.stem}"
        expected = f"<!-- training {name} -->\n{section(load(path), name)}\n<!-- end -->"
        assert expected in document, f"run python -m benchmarks.pages.bench {path} --into docs/training-benchmarks.md"
    codes = f"<!-- codes -->\n{codes_table()}\n<!-- end -->"
    assert codes in document


@pytest.mark.parametrize(
    ("operator", "kernel", "kind"),
    [
        ("aten::mm", "nvjet_tst_192x192_64x4_1x2_h_bz_coopA_NTT", "matmuls"),
        ("aten::addmm", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmuls"),
        ("", "void cutlass::Kernel2<cutlass_80_tensorop_bf16>(Params)", "matmuls"),
        ("aten::_scaled_dot_product_flash_attention", "void pytorch_flash::flash_fwd_kernel<...>(...)", "attention"),
        ("aten::_scaled_dot_product_cudnn_attention_backward", "cudnn_generated_fort_native_sdpa_sm90", "attention"),
        ("RmsNormBackward", "rms_norm_bwd_kernel", "fused"),
        ("", "triton_poi_fused_add_mul_3", "fused"),
        ("tigon::rope_rotate", "", "fused"),
        ("aten::_fused_adamw_", "void at::native::multi_tensor_apply_kernel<...>(...)", "optimizer"),
        ("aten::_foreach_norm", "void at::native::lpnorm_cleanup<...>(...)", "optimizer"),
        ("aten::add", "void at::native::vectorized_elementwise_kernel<4, ...>(...)", "rest"),
        ("", "Memcpy DtoD (Device -> Device)", "rest"),
    ],
)
def test_kind_of_a_kernel(operator, kernel, kind):
    assert kind_of(operator, kernel) == kind


@pytest.mark.parametrize(
    "name", ["Command Buffer Full", "Activity Buffer Request", "Context Sync", "Stream Wait Event"]
)
def test_wait_is_no_time_of_a_kernel(name):
    wait = types.SimpleNamespace(name=name, duration=9000.0)
    work = types.SimpleNamespace(name="multi_tensor_apply_kernel<...>", duration=2000.0)
    step = types.SimpleNamespace(device_type=DeviceType.CPU, name="aten::_fused_adamw_", kernels=[wait, work])
    time_range = types.SimpleNamespace(elapsed_us=lambda: 9000.0)
    alone = types.SimpleNamespace(
        device_type=DeviceType.CUDA, name=name, is_user_annotation=False, time_range=time_range
    )
    times_ms = time_by_kind([step, alone], on_cuda=True, step_ms=3.0)
    assert times_ms == {**dict.fromkeys(KINDS, 0.0), "optimizer": 2.0, "idle": 1.0}


@pytest.mark.parametrize(("optimizer_ms", "shown"), [(400.0, False), (40.0, True)])
def test_split_that_exceeds_its_step_is_not_shown(optimizer_ms, shown):
    kinds_ms = {**dict.fromkeys(KINDS, 0.0), "matmuls": 60.0, "optimizer": optimizer_ms}
    m = StepMeasurement(
        variant="hf:full", code="hf", micro_batch=4, step_ms=timing.Spread(100.0, 99.0, 101.0), tokens_per_s=640.0,
        kinds_ms=kinds_ms,
    )  # fmt: skip
    case = CaseRecord(
        id="x", model="x", batch=4, seq=16, precision="bf16", limit_bytes=None, flops=None, measurements=[m]
    )
    assert ("| 60 |" in table.case_table(case)) == shown


def test_flops_count_the_products_of_a_step_and_half_of_the_attention_matrix(model):
    trainee = Trainee(Case(model=str(model), batch=3, seq=16, precision="fp32", memory=None), CPU, 1)
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
    products = 6 * 48 * (2 * layer + 96 * 32)
    # Forward: two products of 16 x 16 x 32 multiply-adds per sample and layer, halved by the mask. Backward: twice it.
    attention = 3 * 2 * 3 * (2 * 2 * 16 * 16 * 32 // 2)
    assert trainee.flops() == products + attention


def test_restored_weights_are_those_of_the_start_for_every_step_number(model):
    trainee = Trainee(Case(model=str(model), batch=2, seq=8, precision="fp32", memory=None), CPU, 1)
    trainee.restore()
    start = [p.detach().clone() for p in trainee.parameters]
    ready = parse("hf:none").prepare(trainee.model, "none")
    trainee.step(ready.loss, 0, 1)
    assert any(not torch.equal(p, q) for p, q in zip(trainee.parameters, start, strict=True))
    trainee.restore()
    assert all(torch.equal(p, q) for p, q in zip(trainee.parameters, start, strict=True))
    assert all(not value.any() for state in trainee.optimizer.state.values() for value in state.values())


def test_record_of_an_older_tigon_is_refused_by_its_schema(bench, model, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"kind": "training steps", "schema": 0}))
    code, _, err = bench(*quick(model), "--json", path, "--resume")
    assert code == 2 and "schema 0" in err and len(err.splitlines()) == 1
