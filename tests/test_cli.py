"""The command `parlab`: its numbers are those of the functions, and its errors leave no output."""

import json
import os
import re
import subprocess
import sys
import tomllib
from fractions import Fraction
from importlib import import_module

import pytest

import parlab as pl
from parlab.cli.main import COMMANDS, main
from parlab.pipeline.grid import text_grid
from parlab.planner.estimate import estimate
from parlab.planner.layout import FIELDS, Layout
from parlab.planner.reasons import explain
from parlab.planner.search import search
from tools.setup_cell import ROOT

WIDTH = 88


@pytest.fixture
def run(capsys):
    """Return (exit code, output, errors) of one command, in this process."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def answer(run):
    """Return what --json printed."""

    def answer(*arguments):
        code, out, errors = run(*arguments, "--json")
        assert (code, errors) == (0, "")
        return json.loads(out)

    return answer


def process(*arguments, code="import parlab.cli.main as c, sys; sys.exit(c.main())", **options):
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], **options)


# The command as a whole.

EXAMPLES = [
    example.split()[1:]
    for command in COMMANDS.values()
    for example in command.EPILOG.splitlines()
    if example.startswith("  parlab ")
]


def test_the_package_installs_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["parlab"].partition(":")
    assert getattr(import_module(module), function) is main


def test_it_runs_as_a_module_and_without_numpy_and_torch():
    hidden = "import sys; sys.modules |= dict.fromkeys(('numpy', 'torch')); sys.argv[0] = 'parlab'"
    code = f"{hidden}; import runpy; runpy.run_module('parlab', run_name='__main__')"
    for arguments in EXAMPLES:
        ended = process(*arguments, code=code)
        assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout


def test_help_loads_no_heavy_package():
    code = (
        "import sys; import parlab.cli.main as c\n"
        "try: c.main(['--help'])\n"
        "finally: print(sorted(m.split('.')[0] for m in sys.modules), file=sys.stderr)"
    )
    loaded = process(code=code).stderr
    assert "'argparse'" in loaded
    assert not any(f"'{name}'" in loaded for name in ("numpy", "torch", "tomllib", "matplotlib"))


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_has_an_example_and_fits_a_terminal(name, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "88")
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, errors = run(*([name] if name else []), "--help")
    assert (code, errors) == (0, "")
    assert max(map(len, out.splitlines())) <= WIDTH
    if name:
        assert re.search(f"examples?:\n  parlab {name} ", out)
    else:
        assert all(f"\n    {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("arguments", EXAMPLES, ids=" ".join)
def test_examples_run_and_fit_a_terminal(arguments, run):
    code, out, errors = run(*arguments)
    assert (code, errors) == (0, "")
    assert max(map(len, out.splitlines())) <= WIDTH


def keys(value):
    """The keys of the outer objects; those of a list's first entry count."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from keys(inner)


@pytest.mark.parametrize("arguments", EXAMPLES, ids=" ".join)
def test_help_names_every_key_of_the_json(arguments, answer):
    documented = re.findall(r"\w+", COMMANDS[arguments[0]].EPILOG)
    assert set(keys(answer(*arguments))) <= set(documented)


def test_the_version_is_that_of_the_project(run):
    code, out, errors = run("--version")
    assert code == 0 and out.startswith("parlab") and errors == ""


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "required: command"),
        (["memroy"], "invalid choice: 'memroy'"),
        (["memory"], "required: MODEL, --sequence"),
        (["memory", "gpt2", "--seq", "8"], "required: --sequence"),
        (["memory", "gpt2", "--sequence", "1e3"], "--sequence: invalid int value: '1e3'"),
        (["memory", "gpt2", "--sequence", "0"], "sequence must be an int from 1 to 1024, got 0"),
        (["memory", "gpt2", "--sequence", "9" * 30], "sequence must be an int from 1 to 1024"),
        (["memory", "gpt3", "--sequence", "8"], "did you mean gpt2? (or give the path of a con"),
        (["memory", "no/such.json", "--sequence", "8"], "path must be a config.json or a folder"),
        (["memory", "gpt2", "--sequence", "8", "--tp", "0"], "tp must be an int of at least 1"),
        (["memory", "gpt2", "--sequence", "8", "--tp", "5"], "tp must divide heads = 12, got 5"),
        (["memory", "gpt2", "--sequence", "8", "--pp", "-1"], "pp must be an int of at least 1"),
        (["memory", "gpt2", "--sequence", "8", "--pp", "5"], "must divide layers = 12, got 5 x 1"),
        (
            ["memory", "gpt2", "--sequence", "8", "--gpus", "6", "--tp", "4"],
            "gpus must be a multiple of tp x pp = 4, got 6",
        ),
        (["memory", "gpt2", "--sequence", "8", "--stage", "4"], "stage must be an int from 0 to 3"),
        (["memory", "gpt2", "--sequence", "8", "--ep", "2"], "expert_parallel must divide experts"),
        (["memory", "gpt2", "--sequence", "8", "--card", "h100"], "did you mean h200 or h100-sxm"),
        (["memory", "gpt2", "--sequence", "8", "--recompute", "all"], "recompute must be one of"),
        (["schedule", "1f1b", "4"], "required: m"),
        (["schedule", "1f2b", "4", "8"], "did you mean 1f1b"),
        (["schedule", "1f1b", "0", "8"], "p must be an int of at least 1, got 0"),
        (["schedule", "1f1b", "4", "8", "2"], "v must be an int from 1 to 1, got 2: 1f1b has"),
        (["schedule", "interleaved", "4", "8"], "v must be given for interleaved"),
        (["schedule", "zb-v", "4", "8", "3"], "v must be an int from 2 to 2, got 3: zb-v has"),
        (["schedule", "gpipe", "1000000", "1000000"], "p x m x v must be at most 100000, got 1000"),
        (["schedule", "gpipe", "4", "8", "--forward", "nan"], "forward must be a finite number"),
        (["schedule", "gpipe", "4", "8", "--backward", "-1"], "backward must be a finite number"),
        (["schedule", "gpipe", "4", "8", "--transfer", "inf"], "transfer must be a finite number"),
        (["schedule", "gpipe", "4", "8", "--forward", "0", "--backward", "0"], "must not both"),
        (["schedule", "gpipe", "4", "8", "--input-gradient", "1"], "given both or neither"),
    ],
    ids=" ".join,
)
def test_what_it_cannot_answer_ends_with_2_and_no_output(arguments, message, run):
    code, out, errors = run(*arguments)
    assert (code, out) == (2, "")
    assert message in errors
    if "--json" not in arguments and arguments:
        assert run(*arguments, "--json")[:2] == (2, "")


def test_a_failing_process_has_exit_code_2_and_an_empty_output():
    ended = process("memory", "gpt2", "--sequence", 2048)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "parlab memory: error: sequence must be an int from 1 to 1024, got 2048: "
        "no position was learned for a later token\n"
    )


@pytest.mark.skipif(os.name == "nt", reason="pipes break in another way there")
@pytest.mark.parametrize(
    "arguments", ["schedule gpipe 20 30", "schedule 1f1b 2 9 --json", "--help"]
)
def test_a_reader_who_stops_early_sees_no_error(arguments):
    command = [sys.executable, "-m", "parlab", *arguments.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        started.stdout.close()  # long before Python has started and can write
        errors = started.stderr.read()
    assert (started.returncode, errors) == (0, b"")


@pytest.mark.skipif(os.name == "nt", reason="it needs a shell that closes a stream")
def test_a_closed_output_is_no_error():
    command = f'"{sys.executable}" -m parlab schedule gpipe 2 2 >&-'
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


# MODEL: a name, a file or a folder.

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def test_a_model_is_a_name_a_file_or_a_folder(tmp_path, monkeypatch, answer):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "tiny").mkdir()
    for folder in ("gpt2", "tiny"):
        (tmp_path / folder / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    # 2 x (4 x 64 x 64 + 3 x 64 x 96 + 2 x 64) + 64 + 100 x 64
    tiny = 76_352
    expected = {"gpt2": 124_439_808, "GPT2": 124_439_808, "./gpt2": tiny, "tiny": tiny}
    expected |= {"tiny/config.json": tiny, str(tmp_path / "tiny"): tiny}
    for text, n_params in expected.items():
        assert answer("memory", text, "--sequence", 8)["parameters"] == n_params


def test_a_file_that_is_refused_is_named(tmp_path, run):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY | {"model_type": "deepseek_v3", "kv_lora_rank": 512}))
    code, out, errors = run("memory", file, "--sequence", 8)
    assert (code, out) == (2, "")
    assert f"error: {file}: ModelConfig cannot say" in errors and "latent attention" in errors


# parlab memory


def test_fsdp_of_8b_on_8_gpus_has_2_bytes_a_parameter_of_everything_after_the_step(answer):
    memory = answer("memory", "llama-3-8b", "--sequence", 8192, "--gpus", 8, "--stage", 3)
    # 16 bytes a parameter over 8 ranks, and 8,030,261,248 parameters.
    assert memory["total_bytes"][memory["moments"].index("after the step")] == 16_060_522_496
    assert memory["card"] is None


@pytest.mark.parametrize(
    "options, arguments",
    [
        ("", {}),
        ("--gpus 16 --stage 1 --tp 2", {"n_gpus": 8, "stage": 1, "tp": 2}),
        (
            "--gpus 64 --tp 4 --sequence-parallel --pp 4 --chunks 2 --stage 1 --recompute full",
            {
                "n_gpus": 4,
                "stage": 1,
                "tp": 4,
                "sequence_parallel": True,
                "pipeline": 4,
                "chunks": 2,
                "recompute": "full",
            },
        ),
        ("--tp 2 --pp 2 --rank 0", {"tp": 2, "pipeline": 2, "pipeline_rank": 0}),
        (
            "--gpus 8 --ep 8 --recipe fp32-gradients --loss fused --micro-batch 3",
            {
                "n_gpus": 8,
                "expert_parallel": 8,
                "recipe": "fp32-gradients",
                "loss": "fused",
                "micro_batch": 3,
            },
        ),
        ("--gpus 2 --stage 2 --offload", {"n_gpus": 2, "stage": 2, "offload": True}),
    ],
)
def test_memory_is_training_memory(options, arguments, answer):
    shown = answer("memory", "mixtral-8x7b", "--sequence", 4096, *options.split())
    arguments = {"micro_batch": 1, **arguments}
    step = pl.training_memory(pl.model("mixtral-8x7b"), sequence=4096, **arguments)
    assert shown["total_bytes"] == list(step.totals)
    assert shown["peak_bytes"] == step.peak == max(shown["total_bytes"])
    assert shown["peak_moment"] == step.peak_moment
    assert shown["host_bytes"] == step.host_bytes
    assert shown["pipeline_rank"] == step.pipeline_rank
    assert shown["data_parallel_ranks"] == arguments.get("n_gpus", 1)
    items = [(item["name"], item["group"], tuple(item["bytes"])) for item in shown["items"]]
    assert items == list(step.rows)


@pytest.mark.parametrize("gpus, fits", [(1, False), (8, True)])
def test_the_card_is_full_or_not(gpus, fits, run, answer):
    arguments = ("memory", "llama-2-7b", "--sequence", 1024, "--gpus", gpus, "--stage", 3)
    arguments += ("--card", "A100-40")
    memory = answer(*arguments)
    card, usable = memory["card"], pl.gpu("a100-40").usable_bytes
    assert (card["name"], card["usable_bytes"], card["fits"]) == ("a100-40", usable, fits)
    assert card["left_bytes"] == usable - memory["peak_bytes"]
    last = run(*arguments)[1].splitlines()[-1]
    left = pl.format_bytes(abs(card["left_bytes"]))
    assert last == f"a100-40 has {pl.format_bytes(usable)} usable: " + (
        f"fits, {left} left" if fits else f"does not fit, {left} short"
    )


def test_the_table_has_the_items_and_their_total(run):
    _, out, _ = run("memory", "gpt2", "--sequence", 1024, "--micro-batch", 8)
    lines = out.splitlines()
    rows = {line[:29].strip(): line for line in lines}
    step = pl.training_memory(pl.model("gpt2"), 8, sequence=1024)
    for name, totals in [(item.name, item.bytes) for item in step.items] + [("total", step.totals)]:
        assert all(pl.format_bytes(figure) in rows[name] for figure in totals)
    assert f"peak {pl.format_bytes(step.peak)}, {step.peak_moment}" in lines


# parlab schedule

TWICE = {"forward": 1, "backward": 2}
SCHEDULES = {
    "gpipe 4 8": (pl.gpipe(4, 8), TWICE),
    "1F1B 4 8": (pl.one_f_one_b(4, 8), TWICE),
    "1f1b 16 8 --backward 3": (pl.one_f_one_b(16, 8), {"backward": 3}),
    "interleaved 4 8 2": (pl.interleaved_1f1b(4, 8, 2), TWICE),
    "interleaved 4 3 2": (pl.interleaved_1f1b(4, 3, 2), TWICE),
    "interleaved 4 8 1": (pl.interleaved_1f1b(4, 8, 1), TWICE),
    "zb-h1 4 8": (pl.zero_bubble_h1(4, 8), TWICE),
    "zb-h1 4 8 --input-gradient 1.5 --weight-gradient .5": (
        pl.zero_bubble_h1(4, 8),
        {"input_gradient": 1.5, "weight_gradient": 0.5},
    ),
    "zb-h2 4 8": (pl.zero_bubble_h2(4, 8), TWICE),
    "zb-v 4 8 2": (pl.zero_bubble_v(4, 8), TWICE),
    "1f1b 1 1": (pl.one_f_one_b(1, 1), TWICE),
}


@pytest.mark.parametrize("arguments, case", SCHEDULES.items(), ids=SCHEDULES)
def test_a_schedule_is_simulated_and_meets_its_formula(arguments, case, answer):
    shown = answer("schedule", *arguments.split())
    timeline = pl.simulate(case[0], **case[1])
    assert shown["makespan_s"] == timeline.makespan
    assert shown["idle_s"] == timeline.idle
    assert shown["peak_in_flight"] == timeline.peak_in_flight
    assert shown["peak_micro_batches"] == timeline.peak_micro_batches
    assert shown["formula_fails"] is None
    for of, pair in shown["idle"].items():
        assert pair["simulated"] == timeline.bubble(of)
        if pair["formula"] is not None:  # a quotient of sums of floats
            assert pair["formula"] == pytest.approx(pair["simulated"], rel=1e-12)
    assert (shown["idle"]["span"]["formula"] is None) == shown["schedule"].startswith("ZB")
    for pair in shown["longest_idle_s"].values():
        assert pair["formula"] == pair["simulated"]


def test_field_case_of_16_stages_and_8_micro_batches_is_15_of_23_ai_engineering_pr_66(answer):
    idle = answer("schedule", "1f1b", 16, 8)["idle"]
    assert {of: Fraction(p["formula"]).limit_denominator(100) for of, p in idle.items()} == {
        "total": Fraction(15, 23),
        "ideal": Fraction(15, 8),
        "span": Fraction(15, 31),
    }


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ("1f1b 4 8 --transfer 0.5", "messages that take no time"),
        ("zb-h1 4 3", "m >= p and W <= F"),
        ("zb-v 4 8 --backward 3", "F = I = W"),
        ("zb-h2 4 3", "m >= 2 p - 1, W <= F and 2 W <= F + I"),
    ],
)
def test_where_no_formula_holds_the_simulation_stands_alone(arguments, reason, answer, run):
    shown = answer("schedule", *arguments.split())
    assert reason in shown["formula_fails"]
    for pair in [*shown["idle"].values(), *shown["longest_idle_s"].values()]:
        assert pair["formula"] is None and pair["simulated"] > 0
    out = run("schedule", *arguments.split())[1]
    assert f"no formula: {shown['formula_fails']}" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    "arguments, slot",
    [
        ("1f1b 4 8", 1),
        ("interleaved 3 7 2 --forward .1 --backward .25", 0.05),
        ("zb-h1 4 8 --transfer 0.5", 0.5),
        ("gpipe 12 2 --backward 1e-3 --forward 3e-3", 1e-3),
        ("1f1b 2 3 --backward 2.5", 0.5),
    ],
)
def test_the_blocks_of_the_grid_join_to_the_whole(arguments, slot, answer):
    shown = answer("schedule", *arguments.split())
    assert shown["slot_s"] == slot
    blocks, block = [], []
    for line in [*shown["grid"], ""]:
        assert len(line) <= WIDTH
        if line:
            block.append(line)
        else:
            blocks.append(block)
            block = []
    rows = zip(*blocks, strict=True)
    cells = [
        [cell for part in row for cell in part.split()[2 if n else 1 :]]
        for n, row in enumerate(rows)
    ]
    name, *words = arguments.split()
    functions = {
        "1f1b": pl.one_f_one_b,
        "interleaved": pl.interleaved_1f1b,
        "zb-h1": pl.zero_bubble_h1,
        "gpipe": pl.gpipe,
    }
    counts = [int(word) for word in words if word.isdigit()]
    options = words[len(counts) :]
    times = {o[2:]: float(t) for o, t in zip(options[::2], options[1::2], strict=True)}
    timeline = pl.simulate(functions[name](*counts), **{"backward": 2.0, **times})
    whole = text_grid(timeline, slot).splitlines()
    assert cells == [line.split()[2 if n else 1 :] for n, line in enumerate(whole)]
    assert [line[:6] for line in blocks[0]] == [line[:6] for line in whole]


@pytest.mark.parametrize(
    "arguments", ["gpipe 200 300", "gpipe 40 30", "1f1b 2 2 --backward 0.33333333"]
)
def test_a_grid_that_helps_nobody_is_left_out(arguments, answer, run):
    shown = answer("schedule", *arguments.split())
    assert shown["grid"] is None and shown["slot_s"] is None
    assert "no grid: too long" in run("schedule", *arguments.split())[1]


def test_a_schedule_is_printed_with_formulas_beside_figures(run):
    code, out, _ = run("schedule", "1f1b", 4, 9, "--backward", 1)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "over all time 25% 25% (p-1) / (m + p-1)" in lines
    assert "over the work 33.33% 33.33% (p-1) / m" in lines
    assert "over ranks' spans 14.29% 14.29% (p-1) / (2 m + p-1)" in lines
    assert "longest, of one rank 6 s 6 s (p-1) (F+B)" in lines
    assert "makespan 24 s" in lines
    assert "0 6 s 4 4" in lines and "3 6 s 1 1" in lines


# parlab plan

EIGHT = ("plan", "llama-3-8b", "--cluster", "hgx-h100", "--sequence", 8192, "--global-batch", 64)


@pytest.fixture(scope="module")
def found():
    """The search that EIGHT asks for."""
    return search(pl.model("llama-3-8b"), pl.cluster("hgx-h100"), 8192, 64)


def fields(layout):
    return {name: getattr(layout, name) for name in FIELDS}


def test_a_plan_lists_what_the_search_found(found, answer):
    plan = answer(*EIGHT, "--top", 3, "--front")
    assert plan["considered"] == found.considered
    assert plan["near_ties"] == len(found.near_ties)
    assert plan["why"] is None and plan["usable_bytes"] == pl.gpu("h100-sxm").usable_bytes
    assert (plan["gpus"], plan["nodes"], plan["parameters"]) == (8, 1, 8_030_261_248)
    assert len(plan["layouts"]) == 3 and len(plan["front"]) == len(found.front)
    pairs = [*zip(plan["layouts"], found.near_ties, strict=False)]
    pairs += zip(plan["front"], found.front, strict=True)
    for shown, made in pairs:
        assert shown["layout"] == fields(made.layout)
        assert shown["iteration_s"] == made.seconds
        assert (shown["mfu"], shown["hfu"], shown["fits"]) == (made.mfu, made.hfu, True)
        assert [(item["name"], item["seconds"]) for item in shown["times"]] == list(made.times)
        assert shown["memory"]["total_bytes"] == list(made.memory.totals)
        assert shown["memory"]["peak_bytes"] == made.peak_bytes <= plan["usable_bytes"]
        assert shown["usd_per_billion_tokens"] is None


def test_times_and_items_sum_to_what_stands_above_them(answer):
    for shown in answer(*EIGHT)["layouts"]:
        seconds = sum(item["seconds"] for item in shown["times"])
        assert seconds == pytest.approx(shown["iteration_s"], rel=1e-12)  # another order of sums
        tokens = 64 * 8192 / shown["iteration_s"] / 8
        assert shown["tokens_per_second_per_gpu"] == pytest.approx(tokens, rel=1e-12)
        columns = zip(*(item["bytes"] for item in shown["memory"]["items"]), strict=True)
        assert [sum(column) for column in columns] == shown["memory"]["total_bytes"]


def test_the_price_is_that_of_all_gpus_for_the_time_of_10_to_the_9_tokens(answer, run):
    best = answer(*EIGHT, "--price", 2.5)["layouts"][0]
    iterations = 1e9 / (64 * 8192)
    dollars = 8 * 2.5 * iterations * best["iteration_s"] / 3600
    assert best["usd_per_billion_tokens"] == pytest.approx(dollars, rel=1e-12)
    assert f", {dollars:.4g} USD for 10^9 tokens\n" in run(*EIGHT, "--price", 2.5)[1]


@pytest.mark.parametrize(
    "layout, reason, estimated",
    [
        ("dp=7", "Not possible: dp x tp x pp x cp must be the 8 GPUs", False),
        ("tp=16", "Not possible", False),
        ("dp=8", "Needs", True),
        ("dp=8,zero=3,recompute=full", "slower than the best", True),
        ("DP=4, cp=2 ,zero=3,sequence_parallel=false,schedule=1f1b", "slower than the best", True),
    ],
)
def test_why_gives_the_reason_that_the_search_gives(layout, reason, estimated, found, answer, run):
    plan = answer(*EIGHT, "--why", layout)
    asked = Layout(**plan["why"]["layout"])
    assert reason in plan["why"]["reason"] == found.why_not(asked)
    assert (plan["why"]["estimate"] is not None) == estimated
    if estimated:
        made = estimate(pl.model("llama-3-8b"), pl.cluster("hgx-h100"), asked, 8192, 64)
        assert plan["why"]["estimate"]["iteration_s"] == made.seconds
        assert plan["why"]["explanation"] == explain(found.best, made)
    shown = " ".join(run(*EIGHT, "--why", layout)[1].split())
    assert " ".join(f"{asked} {plan['why']['reason']}".split()) in shown


def test_each_listed_layout_can_be_asked_for_by_its_fields(answer):
    mixtral = ("plan", "mixtral-8x7b", "--cluster", "hgx-h100", "--gpus", 16)
    mixtral += ("--sequence", 4096, "--global-batch", 32)
    shown = answer(*mixtral, "--top", 40)["layouts"]
    assert any(made["layout"]["ep"] > 1 for made in shown)
    for made in shown:
        words = ",".join(f"{name}={value}" for name, value in made["layout"].items())
        why = answer(*mixtral, "--why", words)["why"]
        assert why["layout"] == made["layout"]
        assert why["estimate"]["iteration_s"] == made["iteration_s"]


@pytest.mark.parametrize("gpus, nodes", [(2, 1), (8, 1), (16, 2), (48, 6)])
def test_gpus_are_part_of_a_node_or_whole_nodes(gpus, nodes, answer):
    plan = answer(*EIGHT[:-1], 96, "--gpus", gpus)
    assert (plan["gpus"], plan["nodes"]) == (gpus, nodes)
    for made in plan["layouts"]:
        degrees = made["layout"]
        assert gpus == degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]


def test_where_nothing_fits_that_is_the_answer(answer, run):
    # States alone are 16 bytes for each of 6.7 x 10^9 parameters.
    arguments = ("plan", "llama-2-7b", "--cluster", "hgx-a100", "--gpus", 1)
    arguments += ("--sequence", 4096, "--global-batch", 8)
    plan = answer(*arguments, "--why", "dp=1", "--front")
    assert (plan["layouts"], plan["near_ties"], plan["front"]) == ([], 0, [])
    assert plan["considered"] > 0 and plan["why"]["reason"].startswith("Needs")
    code, out, _ = run(*arguments, "--why", "dp=1", "--front")
    usable = pl.format_bytes(pl.gpu("a100-80").usable_bytes)
    assert code == 0 and f"no layout fits: a card has {usable}" in out


@pytest.mark.parametrize(
    "arguments",
    [
        "llama-3-405b --cluster hgx-b200 --gpus 1000000 --global-batch 100000 --why dp=1000",
        "llama-3-70b --cluster hgx-h100 --gpus 512 --global-batch 1024 --why dp=64,tp=8,zero=3",
    ],
)
def test_a_plan_of_many_gpus_fits_a_terminal(arguments, run):
    code, out, errors = run("plan", *arguments.split(), "--sequence", 4096, "--price", 2)
    assert (code, errors) == (0, "")
    assert max(map(len, out.splitlines())) <= WIDTH


def test_a_long_layout_takes_lines_that_end_after_a_comma(answer, capsys):
    plan = answer(*EIGHT, "--top", 1)
    long = {"dp": 4096, "tp": 16, "pp": 16, "cp": 16, "ep": 64, "replicas": 64, "zero": 1}
    long |= {"micro_batch": 128, "chunks": 12, "recompute": "selective", "sequence_parallel": True}
    plan["layouts"][0]["layout"] = long
    COMMANDS["plan"].show(plan)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    head = next(n for n, line in enumerate(lines) if line.startswith("iteration"))
    left = lines[head].index("layout")
    parts = [line[left:] for line in lines[head + 1 : lines.index("", head)]]
    assert len(parts) > 1 and all(part.endswith(",") for part in parts[:-1])
    assert " ".join(parts) == str(Layout(**long))


def test_a_plan_is_printed_with_the_time_and_the_memory_of_the_fastest(run, answer):
    best, second = answer(*EIGHT, "--top", 2)["layouts"]
    lines = [" ".join(line.split()) for line in run(*EIGHT)[1].splitlines()]
    for made in (best, second):
        figures = f"{made['tokens_per_second_per_gpu']:.4g} {100 * made['mfu']:.1f}%"
        peak = pl.format_bytes(made["memory"]["peak_bytes"])
        seconds = pl.format_seconds(made["iteration_s"])
        assert f"{seconds} {figures} {peak} {Layout(**made['layout'])}" in lines
    for item in best["times"]:
        share = f"{100 * item['seconds'] / best['iteration_s']:.1f}%"
        assert f"{item['name']} {pl.format_seconds(item['seconds'])} {share}" in lines
    for item in best["memory"]["items"]:
        assert " ".join([item["name"], *map(pl.format_bytes, item["bytes"])]) in lines


@pytest.mark.parametrize(
    "options, message",
    [
        (["--cluster", "hgx-h10"], "did you mean hgx-h100"),
        (["--gpus", "12"], "gpus must be a multiple of the 8 of hgx-h100, got 12"),
        (["--gpus", "0"], "gpus must be an int of at least 1, got 0"),
        (["--gpus", "8000000"], "must be an int from 1 to 1000000"),
        (["--cluster", "t4-host", "--gpus", "64"], "n_nodes must be 1 without an inter_node link"),
        (["--global-batch", "0"], "global_batch must be an int"),
        (["--sequence", "-8"], "sequence must be an int"),
        (["--recipe", "fp4"], "recipe must be one of"),
        (["--top", "0"], "top must be an int of at least 1, got 0"),
        (["--price", "nan"], "price must be a finite number of at least 0, got nan"),
        (["--price", "-1"], "price must be a finite number of at least 0, got -1.0"),
        (["--why", ""], "a name in why must be one of dp, tp"),
        (["--why", "ddp=8"], "a name in why must be one of dp, tp"),
        (["--why", "dp=8,DP=8"], "dp must stand once in why, got 'dp=8,DP=8'"),
        (["--why", "dp"], "dp must be a whole number in why, got ''"),
        (["--why", "dp=1e3"], "dp must be a whole number in why, got '1e3'"),
        (["--why", "dp=0"], "dp must be an int from 1 to 1000000, got 0"),
        (["--why", "zero=4"], "stage must be an int from 0 to 3, got 4"),
        (["--why", "sequence_parallel=1"], "sequence_parallel must be one of false, true, got '1'"),
        (["--why", "schedule=gpipe"], "schedule must be one of"),
    ],
    ids=" ".join,
)
def test_a_plan_that_makes_no_sense_is_refused(options, message, run):
    code, out, errors = run(*EIGHT, *options)
    assert (code, out) == (2, "")
    assert errors.startswith("parlab plan: error: ") and message in errors


@pytest.mark.parametrize(
    "gpus, words", [("1", "1 data-parallel rank,"), ("8", "8 data-parallel ranks,")]
)
def test_one_rank_is_a_rank(run, gpus, words):
    code, out, _ = run("memory", "gpt2", "--sequence", "8", "--gpus", gpus)
    assert code == 0 and f"one GPU of {words} pipeline rank 0\n" in out
