"""Reference solutions against parlab, stubs, the student's file, and the door of pytest."""

import ast
import os
import secrets
import subprocess
import sys

import numpy as np
import pytest

import parlab as pl
from parlab.exercises import source
from parlab.exercises.__main__ import main
from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.grade import all_cases, grade, run_here
from parlab.exercises.records import AnyOf
from tools.setup_cell import ROOT

SEED = secrets.randbelow(10**6)
REQUIRED = {
    1: "ring_all_reduce ring_reduce_scatter ring_all_gather hierarchical_all_reduce "
    "all_reduce_cost tree_all_reduce_cost ring_tree_crossover_bytes mean_over_ranks "
    "ring_by_messages",
    2: "data_parallel_grad unequal_shards_grad average_gradients token_weighted_mean ddp_by_hand",
    3: "column_parallel row_parallel megatron_mlp columns_only_mlp packed_swiglu_mlp "
    "vocabulary_parallel_cross_entropy heads_on_rank mlp_with_f_and_g",
    4: "gpt_params moe_zero1_bytes zero_memory_bytes zero_memory zero_traffic_bytes dim0_shards "
    "sharded_optimizer_step fsdp_by_hand",
    5: "activation_memory_bytes nodes_needed",
    6: "split_layers pipeline_bubble bubble_of_ideal interleaved_bubble_fraction one_f_one_b "
    "gpipe_grid map_3d_job two_stage_pipeline",
}


def cases_of(name):
    return [case.args for case in all_cases(EXERCISES[name], SEED)]


def solution(name, *args):
    return EXERCISES[name].solution(*args)


def test_every_chapter_has_its_exercises():
    for chapter, names in REQUIRED.items():
        here = [name for name, exercise in EXERCISES.items() if exercise.chapter == chapter]
        assert set(names.split()) <= set(here)
    assert list(EXERCISES) == sorted(EXERCISES, key=lambda name: EXERCISES[name].chapter)


@pytest.mark.parametrize("name", EXERCISES)
def test_every_case_names_where_its_answer_comes_from(name):
    exercise = EXERCISES[name]
    assert all(len(case.source) > 4 for case in exercise.cases)
    assert len(exercise.route) > 8
    if exercise.parts:
        assert all(len(case.expected) == len(exercise.parts) for case in exercise.cases)


@pytest.mark.parametrize("name", EXERCISES)
def test_fixed_answers_are_those_of_the_independent_route_too(name):
    exercise = EXERCISES[name]
    verdict = grade(exercise, lambda *args: plain(exercise.expect(*args)), seed=SEED, run=run_here)
    assert verdict.passed, f"seed {SEED}"


def plain(expected):
    """An expected value as an answer: the first of several right forms."""
    if isinstance(expected, AnyOf):
        return expected.values[0]
    return tuple(map(plain, expected)) if isinstance(expected, tuple) else expected


# The reference solutions beside parlab's own functions, which are other code.


def assert_same_pair(ours, theirs):
    for results, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.hstack(results), np.hstack(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["ring_reduce_scatter", "ring_all_gather"])
def test_collectives_are_parlabs(name):
    for (arrays,) in cases_of(name):
        assert_same_pair(solution(name, arrays), getattr(pl, name)(arrays))


def test_ring_all_reduce_is_parlabs_shifted_by_a_rank():
    for (arrays,) in cases_of("ring_all_reduce"):
        results, sent = solution("ring_all_reduce", arrays)
        wanted, parlab_sent = pl.ring_all_reduce(arrays)
        np.testing.assert_allclose(results, wanted, rtol=1e-12, atol=1e-12)
        # parlab's rank r ends the first phase with chunk r, the lab's with chunk r + 1.
        assert sent == list(np.roll(parlab_sent, -1))


def test_hierarchical_all_reduce_is_parlabs():
    for arrays, local in cases_of("hierarchical_all_reduce"):
        results, leaving = solution("hierarchical_all_reduce", arrays, local)
        schedule = pl.hierarchical_schedule(len(arrays) // local, local)
        chunk = arrays[0].nbytes // schedule.n_chunks
        wanted = pl.hierarchical_all_reduce(arrays, local)[0]
        np.testing.assert_allclose(results, wanted, rtol=1e-12, atol=1e-12)
        assert leaving == pl.bytes_leaving_nodes(schedule, chunk, local)


@pytest.mark.parametrize("name", ["all_reduce_cost", "tree_all_reduce_cost"])
def test_costs_are_parlabs(name):
    for n, size, latency, bandwidth in cases_of(name):
        wanted = getattr(pl, name)(n, size, pl.Link(latency, bandwidth))
        wanted = wanted.steps, wanted.bytes_per_rank, wanted.seconds
        assert solution(name, n, size, latency, bandwidth) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "name, theirs",
    [
        (
            "ring_tree_crossover_bytes",
            lambda n, latency, speed: pl.ring_tree_crossover_bytes(n, pl.Link(latency, speed)),
        ),
        ("data_parallel_grad", pl.data_parallel_grad),
        ("unequal_shards_grad", pl.data_parallel_grad),
        ("average_gradients", pl.average_gradients),
        ("token_weighted_mean", pl.token_weighted_mean),
        ("column_parallel", pl.column_parallel),
        ("row_parallel", pl.row_parallel),
        ("megatron_mlp", pl.megatron_mlp),
        ("packed_swiglu_mlp", pl.packed_swiglu_mlp),
        ("vocabulary_parallel_cross_entropy", pl.vocabulary_parallel_cross_entropy),
        ("zero_memory_bytes", pl.zero_memory_bytes),
        ("zero_traffic_bytes", pl.zero_traffic_bytes),
        ("dim0_shards", pl.dim0_shards),
        ("split_layers", lambda layers, stages: [*map(len, pl.split_layers(layers, stages))]),
        ("pipeline_bubble", pl.pipeline_bubble),
        ("bubble_of_ideal", lambda p, m: pl.pipeline_bubble(p, m, of="ideal")),
        ("interleaved_bubble_fraction", pl.pipeline_bubble),
    ],
)
def test_a_solution_computes_what_parlab_computes(name, theirs):
    for args in cases_of(name):
        # Sums of floats in another order.
        np.testing.assert_allclose(solution(name, *args), theirs(*args), rtol=1e-9, atol=1e-12)


def test_the_items_of_zero_are_parlabs():
    for n_params, n, stage, w, g, k in cases_of("zero_memory"):
        wanted = pl.zero_memory(n_params, n, stage, k, weight_bytes=w, grad_bytes=g)
        assert solution("zero_memory", n_params, n, stage, w, g, k) == pytest.approx(wanted[:3])


def test_both_matrices_by_columns_sends_what_parlab_counts():
    for x, A, B, n in cases_of("columns_only_mlp"):
        step = pl.columns_only_mlp_step(x, A, B, np.zeros_like(x), n)
        output, sent = solution("columns_only_mlp", x, A, B, n)
        np.testing.assert_allclose(output, step.output, rtol=1e-9, atol=1e-12)
        assert [sent] * n == step.sent_forward


def test_activations_are_parlabs():
    for args in cases_of("activation_memory_bytes"):
        layers, hidden, heads, s, b, *rest = args
        t, cut, recompute = (*rest, *(1, False, "none")[len(rest) :])
        config = pl.ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=1)
        options = {"sequence": s, "tp": t, "sequence_parallel": cut, "recompute": recompute}
        wanted = pl.activation_memory_bytes(config, b, **options)
        assert solution("activation_memory_bytes", *args) == pytest.approx(wanted, rel=1e-12)


def test_nodes_needed_are_the_fewest_on_which_parlabs_states_fit():
    for n_params, activations, *rest in cases_of("nodes_needed"):
        card, per_node = (*rest, *(80e9, 8)[len(rest) :])
        nodes = solution("nodes_needed", n_params, activations, *rest)
        if nodes is None:
            assert activations >= card
            continue

        def fits(nodes, n_params=n_params, activations=activations, card=card, per=per_node):
            return pl.zero_memory_bytes(n_params, nodes * per, 3) + activations <= card

        assert fits(nodes) and not (nodes > 1 and fits(nodes - 1))


def test_counted_parameters_are_parlabs():
    for layers, hidden, vocab, positions, tied in cases_of("gpt_params"):
        config = pl.ModelConfig(
            layers=layers, hidden=hidden, heads=1, vocab=vocab, positions=positions, tied=tied
        )
        ours = solution("gpt_params", layers, hidden, vocab, positions, tied)
        assert ours == config.n_params


def test_mixtral_with_experts_cut_is_parlabs():
    config = pl.model("mixtral-8x7b")
    expert = config.parameters.mlp // config.experts
    shared = config.n_params - config.parameters.mlp
    for ep in (1, 2, 8):
        ours = solution("moe_zero1_bytes", shared, expert, config.experts, 2, 64, ep)
        wanted = pl.expert_zero_memory_bytes(config, 64, 1, expert_parallel=ep)
        assert ours == pytest.approx(wanted, rel=1e-12)


def test_heads_are_parlabs():
    for args in cases_of("heads_on_rank"):
        wanted = pl.heads_of_rank(*args, replicate=True)
        assert solution("heads_on_rank", *args) == tuple(map(list, wanted))


def test_orders_and_grids_run_to_their_end_in_parlabs_simulator():
    for p, m in cases_of("one_f_one_b"):
        orders, peaks = solution("one_f_one_b", p, m)
        schedule = pl.schedule_by_hand([" ".join(order) for order in orders])
        timeline = pl.simulate(schedule)
        assert list(timeline.peak_in_flight) == peaks
        assert float(timeline.idle_fraction) == pytest.approx((p - 1) / (m + p - 1))
        grid, idle, _ = solution("gpipe_grid", p, m)
        assert idle == 2 * p * (p - 1) == sum(row.count(".") for row in grid)


def test_every_rank_is_in_one_group_of_each_axis():
    for tp, dp, pp, *node in cases_of("map_3d_job"):
        groups, nodes = solution("map_3d_job", tp, dp, pp, *node)
        for axis, size in (("tp", tp), ("dp", dp), ("pp", pp)):
            assert sorted(sum(groups[axis], [])) == list(range(tp * dp * pp))
            assert {len(group) for group in groups[axis]} == {size}
            assert 1 <= nodes[axis] <= size


# Stubs and solutions come from one source.


@pytest.mark.parametrize("name", EXERCISES)
def test_stub_and_solution_share_signature_docstring_and_given_lines(name):
    stub, solved = source.stub_text(name), source.solution_text(name)
    (stub_tree,), (solved_tree,) = ast.parse(stub).body, ast.parse(solved).body
    assert ast.unparse(stub_tree.args) == ast.unparse(solved_tree.args)
    assert ast.get_docstring(stub_tree) == ast.get_docstring(solved_tree)
    assert stub_tree.name == solved_tree.name == name
    assert "# given" not in stub + solved
    assert stub.count("raise NotImplementedError") == 1 and "NotImplemented" not in solved
    own = set(solved.splitlines()) - set(stub.splitlines())
    assert own, "the stub must not be the solution"
    statements = [node for node in solved_tree.body if not isinstance(node, ast.Import)]
    assert len(statements) <= 11 and len(solved.splitlines()) - solved.count("\n\n") < 56


@pytest.mark.parametrize("name", EXERCISES)
def test_a_notebook_shows_the_text_and_a_short_cell(name):
    markdown, code = source.notebook_cells(name)
    assert markdown.startswith(f"**{name}.** ") and "```python\n>>> " in markdown
    assert markdown.count("```") % 2 == 0
    lines = code.splitlines()
    assert len(lines) <= 15 and max(map(len, lines)) <= 88  # as every cell of the book
    assert lines[-1] == f"pl.check({name})" and '"""' not in code
    (function, _) = ast.parse(code).body
    (stub,) = ast.parse(source.stub_text(name)).body
    assert list(map(ast.unparse, function.body)) == list(map(ast.unparse, stub.body[1:]))


def functions_of(text):
    namespace = {}
    exec(text, namespace)
    return namespace


@pytest.mark.parametrize("name", EXERCISES)
def test_the_untouched_stub_fails_calmly_and_the_printed_solution_passes(name):
    stubs = functions_of(source.student_file())
    run = None if EXERCISES[name].n_ranks else run_here
    verdict = grade(EXERCISES[name], stubs[name], seed=SEED, run=run)
    assert verdict.status == "not written" and not verdict.mistakes
    solved = functions_of(source.HEADER + "\n" + "".join(map(source.solution_text, EXERCISES)))
    assert grade(EXERCISES[name], solved[name], seed=SEED, run=run).passed


def test_the_students_file_holds_the_stubs():
    text = (ROOT / "exercises" / "student.py").read_text(encoding="utf-8")
    assert text == source.student_file(), "run: python -m parlab.exercises exercises/student.py"


def test_writing_the_file_spares_work_that_is_there(tmp_path, capsys):
    path = tmp_path / "student.py"
    assert main([str(path)]) == 0
    assert path.read_text(encoding="utf-8") == source.student_file()
    assert main([str(path)]) == 0
    path.write_text("mine", encoding="utf-8")
    assert main([str(path)]) == 1
    assert path.read_text(encoding="utf-8") == "mine"
    assert "--force" in capsys.readouterr().err
    assert main([str(path), "--force"]) == 0
    assert path.read_text(encoding="utf-8") == source.student_file()


# The door of pytest.


def run_pytest(*arguments, folder=ROOT, **environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "exercises"]
    run = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout + run.stderr


def test_pytest_tests_the_reference_solutions_and_repeats_a_seed():
    code, text = run_pytest("--seed=7", "-v", LAB_MODULE="solution")
    assert code == 0, text
    assert f"{len(EXERCISES)} passed" in text
    assert "exercises: solution, random inputs of --seed=7" in text


def test_pytest_leaves_out_the_exercises_on_ranks_on_request():
    code, text = run_pytest("--collect-only", "-m", "not ranks")
    on_ranks = [name for name, exercise in EXERCISES.items() if exercise.n_ranks]
    assert code == 0 and len(on_ranks) == 6
    assert f"{len(EXERCISES) - 6}/{len(EXERCISES)} tests collected (6 deselected)" in text
    assert not any(f"[{name}]" in text for name in on_ranks)


def test_pytest_fails_calmly_on_the_stubs():
    code, text = run_pytest("-k", "bubble", "--impl=student")
    assert code == 1
    for name in ("pipeline_bubble", "bubble_of_ideal", "interleaved_bubble_fraction"):
        assert f"\n{name}: not written yet.\n" in text
    assert "Traceback" not in text and len(text.splitlines()) < 25


def test_pytest_tests_any_file_with_its_helpers(tmp_path):
    path = tmp_path / "my_answers.py"
    path.write_text(
        "def idle(p, m):\n    return (p - 1) / (m + p - 1)\n"
        "def pipeline_bubble(p, m):\n    return idle(p, m)\n"
        "def bubble_of_ideal(p, m):\n    return idle(p, m)\n"
    )
    code, text = run_pytest(f"--impl={path}", "-k", "bubble")
    assert code == 1 and "1 passed" in text
    assert "A known mistake: the other convention: idle over total time." in text
    assert "interleaved_bubble_fraction: there is no function of this name" in text


@pytest.mark.parametrize(
    "content, said",
    [
        ("def f(:\n    pass\n", "SyntaxError: invalid syntax (student_file.py, line 1)"),
        ("import os\n1 / 0\n", "division by zero\n    in <module>, line 2: 1 / 0"),
        ("import sys\nsys.exit(0)\n", "it called exit"),
        ("import os\nos._exit(0)\n", "it ended Python itself"),
        (None, "there is no file"),
    ],
    ids=["syntax", "error", "exit", "os._exit", "missing"],
)
def test_a_file_that_cannot_be_loaded_says_why(tmp_path, content, said):
    from parlab.exercises.solutions_file import CannotLoad, functions_in

    path = tmp_path / "student_file.py"
    if content:
        path.write_text(content)
    with pytest.raises(CannotLoad) as caught:
        functions_in(path)
    assert said in str(caught.value)
