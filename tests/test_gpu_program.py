"""The measuring program without a card: its predictions byte for byte, and what goes wrong."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import parlab as pl
from parlab.distributed import compat
from parlab.distributed.gpt import Block, GPTConfig
from parlab.distributed.gpu import __main__ as program
from parlab.distributed.gpu import fsdp, record
from parlab.distributed.gpu.decoder import Decoder, measure_full_fine_tuning
from parlab.distributed.gpu.fsdp import measure_fsdp
from parlab.distributed.gpu.gauge import open_gauge
from parlab.distributed.gpu.links import host_link
from parlab.distributed.gpu.machine import Machine, Skipped
from parlab.distributed.gpu.parts import Found
from parlab.distributed.gpu.training import Step, measure_training, step_seconds, token_batch
from parlab.distributed.saved import measure as measure_saved
from parlab.gpu_prediction.fits import lora_params, ways_to_fit
from parlab.gpu_prediction.rows import predicted_rows
from parlab.gpu_prediction.training import activation_line, autocast_layer, autocast_memory
from parlab.measurements import COMMIT

GPT2 = pl.model("gpt2")
QWEN = pl.model("qwen2.5-0.5b")
SMALL = pl.ModelConfig(layers=3, hidden=64, heads=4, vocab=500, positions=64)
FEW_WORDS = pl.ModelConfig(layers=2, hidden=64, heads=4, vocab=16, positions=64)


# The gauge without a card.


def test_the_tracker_counts_what_torchs_own_tracker_counts():
    with open_gauge("cpu") as gauge:
        step = Step(gauge.device, SMALL)
        tokens, targets = token_batch(4, 64, SMALL.vocab, "cpu")
        step.run(tokens, targets)
        theirs = compat.memory_tracker(step.model, step.optimizer, (tokens,))
        with theirs:
            gauge.reset_peak()
            step.run(tokens, targets)
        seen = sum(compat.tracked_bytes(theirs, "peak").values())
        numbers = 4 * sum(1 for _ in step.model.parameters())  # of steps, which ours leaves out
        assert 0 <= seen - numbers - gauge.peak() <= 16  # and the loss, its sum and its count


def test_the_tracker_follows_a_storage_that_is_emptied_and_filled():
    torchs_own = torch.UntypedStorage.resize_
    with open_gauge("cpu") as gauge:
        x = torch.ones(1000)
        x.untyped_storage().resize_(0)
        assert (gauge.now(), gauge.peak()) == (0, 4000)
        x.untyped_storage().resize_(8000)
        assert (gauge.now(), gauge.peak()) == (8000, 8000)
    assert torch.UntypedStorage.resize_ is torchs_own


def test_a_limit_raises_what_a_card_raises_and_is_gone_afterwards():
    with open_gauge("cpu") as gauge:
        with gauge.limited_to(10_000), pytest.raises(torch.OutOfMemoryError, match="of 10000"):
            torch.ones(2501)
        torch.ones(2501)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device must be one of cuda, cpu"), open_gauge("tpu"):
        pass


# Training: the prediction against the tracker.


@pytest.fixture(scope="module")
def gpt2_124m():
    return {
        recompute: measure_training("cpu", GPT2, 8, sequence=1024, recompute=recompute, steps=2)
        for recompute in ("none", "full")
    }


def test_gpt2_124m_under_bf16_autocast_byte_for_byte_by_hand(gpt2_124m):
    run, psi = gpt2_124m["none"], 124_439_808
    tokens, h, layers, vocab = 8 * 1024, 768, 12, 50257
    ids = 2 * 8 * tokens
    # Of a layer: 40 sbh, the scores' log-sum-exp in 12 heads, two norms' mean and deviation.
    layer = 40 * tokens * h + 4 * 12 * tokens + 2 * 8 * tokens
    head = 4 * tokens * h + 2 * tokens * h + 8 * tokens
    casts = 2 * (vocab * h + layers * 12 * h * h)
    loss = 12 * psi + ids + layers * layer + head + casts + 4 * tokens * vocab
    assert run.at("after the step") == 16 * psi + ids
    assert run.at("loss") == loss
    assert run.items["behind the layers"] == (
        layers * layer + 4 * tokens * h + 2 * layers * (12 * h * h + 9 * h)  # with biases
    )
    assert run.at("backward") == loss + 8 * tokens * vocab  # two more tensors of the logits' size
    assert run.at("optimizer") == 20 * psi + ids  # foreach: 4 more bytes a parameter
    assert run.peak == run.at("backward") == 9_744_941_568


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gpt2_124m_is_what_the_prediction_says(gpt2_124m, recompute):
    predicted = autocast_memory(GPT2, 8, sequence=1024, recompute=recompute)
    assert gpt2_124m[recompute].totals == predicted.totals
    assert gpt2_124m[recompute].peak == predicted.peak


def test_checkpointing_moves_the_layers_activations_and_casts_and_nothing_else(gpt2_124m):
    kept = {name: run.items["kept for backward"] for name, run in gpt2_124m.items()}
    inputs, layers = 4 * 8192 * 768, 12
    layer = sum(size for _, size in autocast_layer(GPT2, 8, sequence=1024))
    casts = 2 * layers * 12 * 768 * 768
    assert kept["none"] - kept["full"] == layers * (layer - inputs) + casts
    moved = ("kept for backward", "behind the layers")
    others = [
        {item: size for item, size in run.items.items() if item not in moved}
        for run in gpt2_124m.values()
    ]
    assert others[0] == others[1]


def test_eager_autocast_keeps_a_quarter_more_than_the_papers_16_bit_layer():
    ours = sum(size for _, size in autocast_layer(GPT2, 8, sequence=1024))
    papers = pl.activation_memory_bytes(GPT2, 8, sequence=1024, dropout=False, flash=True) / 12
    sbh, both_have = 8192 * 768, 4 * 8192 * 12
    assert papers - both_have == 32 * sbh
    assert ours - both_have - 16 * 8192 == 40 * sbh


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "config, b, s",
    [(SMALL, 4, 64), (FEW_WORDS, 16, 64), (FEW_WORDS, 3, 16), (SMALL, 1, 8)],
    ids=["the loss is fullest", "a layer is", "the optimizer is, s short", "one short row"],
)
def test_small_shapes_byte_for_byte_wherever_a_step_is_fullest(config, b, s, recompute, compute):
    options = {"sequence": s, "recompute": recompute, "compute": compute}
    measured = measure_training("cpu", config, b, steps=2, **options)
    predicted = autocast_memory(config, b, **options)
    assert measured.peak == predicted.peak
    for moment in ("after the step", "loss", "optimizer"):
        assert measured.at(moment) == predicted.at(moment)
    # Where the weights of a layer outweigh its activations, the prediction leaves a copy out.
    assert 0 <= measured.at("backward") - predicted.at("backward") <= 4 * 2 * 64 * 64 * 4


def test_fp16_with_a_scaler_holds_what_bf16_holds():
    runs = [
        measure_training("cpu", SMALL, 4, sequence=64, compute=compute)
        for compute in ("bf16", "fp16")
    ]
    assert runs[0].totals == runs[1].totals


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_block_keeps_by_autograds_own_hooks_what_the_layer_lists(compute):
    b, s, h = 2, 32, 64
    block = Block(GPTConfig(vocab=1, layers=1, hidden=h, heads=4, sequence=s))
    matrices = 2 * 12 * h * h  # 16-bit casts of the weights, which a block also keeps
    dtype = torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=compute == "bf16"):
        kept = measure_saved(block, torch.ones(b, s, h))
    listed = sum(size for _, size in autocast_layer(SMALL, b, sequence=s, compute=compute))
    assert kept.total == listed + (matrices if compute == "bf16" else 0)


def test_the_peak_is_a_line_over_the_micro_batch():
    fixed, slope = activation_line(SMALL, sequence=64)
    for b in (4, 8):
        assert measure_training("cpu", SMALL, b, sequence=64, steps=2).peak == fixed + b * slope


@pytest.mark.parametrize(
    "config",
    [QWEN, replace(GPT2, tied=False), replace(GPT2, kv_heads=6), replace(GPT2, positions=None)],
    ids=["Qwen", "untied", "grouped queries", "no positions"],
)
def test_a_shape_that_the_prediction_does_not_know_is_refused(config):
    with pytest.raises(ValueError, match="GPT-2's kind"):
        autocast_memory(config, 1, sequence=64)


def test_a_measurement_needs_a_step_after_the_first():
    with pytest.raises(ValueError, match="steps must be an int of at least 2"):
        measure_training("cpu", SMALL, 1, sequence=8, steps=1)


def test_a_step_with_data_takes_time():
    assert step_seconds("cpu", FEW_WORDS, 1, sequence=8, steps=1) > 0


# Full fine-tuning.


def test_qwen_at_full_size_holds_7_9_gb_of_states_and_8_gb_are_too_few_for_its_step():
    run = measure_full_fine_tuning("cpu", QWEN, 512)
    assert run.after_step == 16 * 494_032_768 + 2 * 8 * 512
    assert run.peak == 20 * 494_032_768 + 2 * 8 * 512
    small = measure_full_fine_tuning("cpu", QWEN, 512, card_bytes=8e9)
    assert small.failed == "optimizer" and small.after_step is None
    assert "of 8000000000" in small.message


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3-8b"])
def test_a_decoder_has_exactly_the_parameters_of_its_shape(name):
    config = pl.model(name)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(weight.numel() for weight in model.parameters()) == config.n_params


def test_a_decoder_of_gpt2s_kind_is_refused():
    with pytest.raises(ValueError, match="learned positions"):
        Decoder(GPT2)


def test_lora_of_rank_16_trains_8_798_208_parameters_of_qwen():
    # By matrices: q and o, k and v, gate and up, down; 24 layers.
    by_matrix = 2 * (896 + 896) + 2 * (896 + 128) + 2 * (896 + 4864) + (4864 + 896)
    assert lora_params(QWEN, 16) == 24 * 16 * by_matrix == 8_798_208


def test_the_ways_to_fit_say_what_a_step_measures():
    full = ways_to_fit(QWEN, 8e9)[0]
    assert full.states == 16 * QWEN.n_params and full.peak == 20 * QWEN.n_params
    assert not full.fits and ways_to_fit(QWEN, 10e9)[0].fits
    eight_bit = ways_to_fit(QWEN, 8e9)[3]
    assert eight_bit.states == 10 * QWEN.n_params and eight_bit.fits


# FSDP at N = 1.


def test_fully_shard_at_n_1_holds_the_same_between_steps_and_the_root_once_more_at_the_peak():
    plain = measure_training("cpu", SMALL, 4, sequence=64)
    sharded = measure_fsdp("cpu", SMALL, 4, sequence=64)
    root = 4 * (500 * 64 + 64 * 64 + 2 * 64)  # embedding, positions, last norm in fp32
    assert [s - p for s, p in zip(sharded.totals, plain.totals, strict=True)] == [0, root, root, 0]
    assert sharded.totals == pl.fsdp_memory(SMALL, 4, sequence=64).totals
    assert sharded.peak == sharded.at("backward")


def test_offloading_leaves_activations_and_what_is_gathered_on_the_card():
    sharded = measure_fsdp("cpu", SMALL, 4, sequence=64)
    offloaded = measure_fsdp("cpu", SMALL, 4, sequence=64, offload=True)
    psi = SMALL.n_params
    assert offloaded.host_bytes == 16 * psi and sharded.host_bytes == 0
    assert sharded.peak - offloaded.peak == 12 * psi  # gradients are not there yet
    assert sharded.at("after the step") - offloaded.at("after the step") == 16 * psi
    assert offloaded.totals == pl.fsdp_memory(SMALL, 4, sequence=64, offload=True).totals
    assert not dist.is_initialized()


def test_where_backward_is_fullest_in_a_layer_fsdp_is_not_predicted():
    with pytest.raises(ValueError, match="fullest inside the layers"):
        pl.fsdp_memory(FEW_WORDS, 16, sequence=64)


def test_offloading_takes_the_links_time_and_the_hosts():
    layers = 12 * GPT2.layer_params
    seconds = pl.offload_seconds(GPT2, 1e9, 2e9, 1e8)
    assert seconds.to_card == pytest.approx((4 * GPT2.n_params + 4 * layers) / 1e9)
    assert seconds.to_host == pytest.approx(4 * GPT2.n_params / 2e9)
    assert seconds.optimizer == pytest.approx(GPT2.n_params / 1e8)
    with pytest.raises(ValueError, match="to_host_bytes_per_s"):
        pl.offload_seconds(GPT2, 1e9, 0, 1e8)


def test_a_host_without_the_memory_is_told_need_and_have(monkeypatch):
    monkeypatch.setattr(fsdp, "free_host_bytes", lambda: 10**9)
    with pytest.raises(MemoryError, match=r"needs 2\.00 GB .* 1\.00 GB are free"):
        fsdp.require_host_memory(2 * 10**9)
    fsdp.require_host_memory(10**9)
    monkeypatch.setattr(fsdp, "free_host_bytes", lambda: None)  # not Linux: let the system decide
    fsdp.require_host_memory(10**15)


def test_without_nccl_fsdp_on_a_card_says_where_there_is_one(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(RuntimeError, match="no nccl .* WSL2"), fsdp.one_rank("cuda"):
        pass


def test_the_link_is_timed_both_ways():
    link = host_link("cpu", size_bytes=40_000, adam_params=1000, repeats=1)
    assert min(link[:3]) > 0 and link.pinned is False


# The program.

COMMAND = [sys.executable, "-m", "parlab.distributed.gpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_program_ends_with_2_and_says_what_to_do(capsys):
    assert program.main([]) == 2
    said = capsys.readouterr().err
    assert "no CUDA card" in said and "--device cpu" in said


def test_every_part_runs_in_a_dry_run_which_writes_nothing_unless_told_where(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert program.main(["--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "nothing is written" in said and "skipped:" not in said
    tables = [line for line in said.splitlines() if line.endswith("%")]
    assert len(tables) > 50 and max(map(len, tables)) <= 88  # a page of the book is that wide
    assert list(tmp_path.iterdir()) == []


def fail(machine):
    """Fails as a card does in mid-run."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more lines")


def run_out(machine):
    """Runs out of memory."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_cuda_error_ends_its_part_and_the_file_is_still_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(program.PARTS, "training", fail)
    monkeypatch.setitem(program.PARTS, "sweep", run_out)
    parts = ["--parts", "training", "sweep", "products"]
    assert program.main(["--device", "cpu", "--out", str(tmp_path), *parts]) == 1
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert written["skipped"]["training"] == (
        "failed: RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    why = written["skipped"]["sweep"]
    assert why.startswith("ran out of memory") and "Tried to allocate 2.00 GiB" in why
    assert written["skipped"]["fsdp"] == "not asked for"
    assert {row["part"] for row in written["rows"]} == {"products"}


def test_a_part_that_gives_no_number_fails_alone(tmp_path, monkeypatch):
    sizes = {"products": [[64, 64, 64]], "attention": [1, 2, 32, 8]}
    measured = {"n = 64": float("nan"), "attention, 1 x 2 heads, 32 x 8": 1e9}
    found = Found(sizes | {"compute": "fp32", "data_sheet": None}, measured, {})
    monkeypatch.setitem(program.PARTS, "products", lambda machine: found)
    parts = ["--parts", "products", "host link"]
    assert program.main(["--device", "cpu", "--out", str(tmp_path), *parts]) == 1
    (path,) = tmp_path.iterdir()
    assert "n = 64 came out as nan" in json.loads(path.read_text())["skipped"]["products"]


def test_where_nothing_was_measured_no_file_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(program.PARTS, "training", fail)
    parts = ["--parts", "training"]
    assert program.main(["--device", "cpu", "--out", str(tmp_path), *parts]) == 1
    assert "nothing was measured" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_no_part_starts_when_the_minutes_are_over(capsys):
    assert program.main(["--device", "cpu", "--minutes", "1e-9", "--parts", "sweep", "fsdp"]) == 0
    assert "fsdp: skipped, no time left" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--minutes", "nan"], ["--parts", "x"]])
def test_arguments_that_cannot_be_used_end_with_2(arguments):
    with pytest.raises(SystemExit) as ended:
        program.main(["--device", "cpu", *arguments])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "free, b",
    [(1e15, 8), (11e9, 8), (10e9, 4), (6.5e9, 4), (3.5e9, 1)],
    ids=["any", "11 GB", "10 GB", "6.5 GB", "3.5 GB"],
)
def test_the_largest_micro_batch_of_gpt2_that_fits_is_taken(free, b, monkeypatch):
    monkeypatch.setattr(Machine, "shape", "gpt2")
    chosen = Machine("cpu", free).batch()
    assert chosen == {"model": "gpt2", "micro_batch": b, "sequence": 1024, "compute": "bf16"}
    assert autocast_memory(GPT2, b, sequence=1024).peak <= 0.9 * free


def test_a_card_for_not_even_one_sequence_is_told_need_and_have(monkeypatch):
    monkeypatch.setattr(Machine, "shape", "gpt2")
    with pytest.raises(Skipped, match=r"needs 2\.7. GB of the card, of which 1\.80 GB"):
        Machine("cpu", 2e9).batch()


def test_a_killed_run_leaves_no_file(tmp_path):
    run = subprocess.Popen(
        [*COMMAND, "--device", "cpu", "--out", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for line in run.stdout:
        if line.startswith("recomputation"):  # a part is over, another runs
            break
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert list(tmp_path.glob("*.json")) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    whole = {"card": "NVIDIA H200", "utc": "2026-11-29T20:00:00Z"}
    path = record.write(whole, tmp_path)
    assert path.name == "nvidia-h200-20261129T200000Z.json"
    with pytest.raises(ValueError, match="nan|JSON"):
        record.write(whole | {"card": "x", "rows": float("nan")}, tmp_path)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        record.write(whole | {"card": "Tesla T4"}, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert json.loads(path.read_text()) == whole


def test_whoever_holds_much_of_the_card_is_spoken_of():
    assert record.others_on_the_card(0.5e9, 16e9) == ""  # a context of CUDA itself
    said = record.others_on_the_card(8e9, 16e9)
    assert "other processes hold 8.0 GB of the card's 16.0 GB" in said and "skipped" in said


def test_provenance_names_the_commit_or_says_that_it_does_not_know(monkeypatch):
    monkeypatch.delenv("PARLAB_COMMIT", raising=False)
    assert COMMIT.fullmatch(record.commit())
    monkeypatch.setattr(record, "_output", lambda command: None)  # no git, or not a checkout
    assert record.commit() == "unknown"
    monkeypatch.setenv("PARLAB_COMMIT", "0123456789" * 4)  # of a copy without its history
    assert record.commit() == "0123456789" * 4
    monkeypatch.setenv("PARLAB_COMMIT", "main")
    with pytest.raises(ValueError, match="PARLAB_COMMIT must be a commit's 40 hex digits"):
        record.commit()


def test_the_package_is_there_before_torch_is():
    code = "import sys; sys.modules['torch'] = None; import parlab; parlab.autocast_memory"
    subprocess.run([sys.executable, "-c", code], check=True)


# Rates and times of a card that the data sheet has: what nobody ran here, from the formulas alone.


def test_products_are_predicted_with_their_launch_and_attention_by_its_efficiency():
    c = {"products": [[8192, 50257, 768]], "attention": [4, 16, 2048, 128]}
    rows = predicted_rows("products", c | {"compute": "bf16", "data_sheet": "h200"})
    h200, e = pl.gpu("h200"), pl.FITTED
    m, n, k = 8192, 50257, 768
    seconds = 2 * m * n * k / (e.matmul_peak * h200.bf16_flop_per_s) + e.launch
    # Each operand goes to each tile once, 2 bytes an element; each matrix is moved once.
    shared = h200.l1_bandwidth_bytes_per_s or 10 * h200.memory_bandwidth_bytes_per_s
    seconds += 2 * (m * n * k / e.matmul_tile + m * n * k / e.matmul_tile) / shared
    seconds += 2 * (m * n + m * k + k * n) / h200.memory_bandwidth_bytes_per_s
    product, attention = rows.values()
    assert list(rows) == ["8192 x 50257, inner size 768", "attention, 4 x 16 heads, 2048 x 128"]
    assert product.value == pytest.approx(2 * m * n * k / seconds, rel=1e-12)
    assert attention.value == pytest.approx(e.attention * shared, rel=1e-12)


def test_a_step_is_predicted_as_the_planner_estimates_it_and_not_without_tensor_cores():
    step = {"model": "gpt2", "micro_batch": 8, "sequence": 1024}
    c = {"steps": {"GPT-2": step}, "compute": "bf16", "data_sheet": "h200", "kernels": True}
    one = replace(pl.cluster("hgx-h200"), gpus_per_node=1)
    whole = pl.estimate(GPT2, one, pl.Layout(micro_batch=8), 1024, 8, fused=False)
    assert predicted_rows("steps", c)["GPT-2"] == ("s", whole.seconds)
    assert predicted_rows("steps", c | {"compute": "fp32"})["GPT-2"].value is None
    assert predicted_rows("steps", c | {"data_sheet": None})["GPT-2"].value is None
