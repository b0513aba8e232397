"""The published figures are complete, sourced, and as printed; no row contradicts its formula."""

import re
from datetime import date

import pytest

from parlab import accuracy
from parlab.published import Published, all_reduce_times, published_ids, published_table


@pytest.mark.parametrize("table_id", published_ids())
def test_table_states_its_source_tag_unit_and_conditions(table_id):
    table = published_table(table_id)
    assert table.tag in ("formula", "measured")
    for text in (table.what, table.unit, table.conditions):
        assert text
    assert re.search(r"arXiv \d{4}\.\d{5}|https://|^Least squares over", table.source)
    assert date(2020, 1, 1) <= date.fromisoformat(table.as_of)
    assert table.values, "a table without rows proves nothing"


@pytest.mark.parametrize("table_id", published_ids())
def test_column_holds_one_kind_of_value_and_no_row_repeats(table_id):
    table = published_table(table_id)
    assert len(set(table.columns)) == len(table.columns)
    assert len(set(table.values)) == len(table.values)
    for column in zip(*table.values, strict=True):
        kinds = {float if type(value) is int else type(value) for value in column}
        assert len(kinds) == 1 and kinds <= {float, str, bool}


@pytest.mark.parametrize(
    ("table_id", "n_rows"),
    [
        ("zero-model-states", 18),
        ("activation-memory", 4),
        ("activation-memory-percent", 4),
        ("iteration-time", 4),
        ("weak-scaling", 10),
        ("weak-scaling-virtual-stages", 4),
        ("megatron-peak-memory", 4),
        ("fsdp2-llama-3-8b", 4),
        ("fsdp2-llama-3-8b-drop", 1),
        ("bus-bandwidth-factors", 6),
        ("all-reduce-h200", 20),
        ("all-reduce-a100", 20),
        ("alpha-beta-fit-error", 4),
        ("pipeline-bubbles", 4),
        ("zero-bubble", 4),
        ("dualpipe", 3),
        ("model-states-7b", 4),
        ("ptd-p-against-zero-3", 4),
        ("llama-3-405b-mfu", 1),
        ("mpt-h100-80", 52),
        ("mpt-a100-80", 60),
        ("mpt-a100-40", 78),
        ("torchtitan-a100", 6),
        ("kempner-h200", 23),
    ],
)
def test_table_is_complete(table_id, n_rows):
    assert len(published_table(table_id).values) == n_rows


def test_no_table_escapes_the_count_above():
    assert len(published_ids()) == 24


@pytest.mark.parametrize(
    "row", published_table("zero-model-states").rows, ids=lambda r: f"{r['n_params']}-{r['n_gpus']}"
)
def test_zero_states_are_sixteen_bytes_sharded_by_stage(row):
    params_gb, n = row["n_params"] / 1e9, row["n_gpus"]
    expected = [(4 + 12 / n) * params_gb, (2 + 14 / n) * params_gb, 16 / n * params_gb]
    printed = [row["stage_1_gb"], row["stage_2_gb"], row["stage_3_gb"]]
    # The paper prints three to five digits and cuts some of them off instead of rounding.
    assert printed == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("row", published_table("activation-memory").rows, ids=lambda r: r["model"])
def test_activation_memory_follows_the_formulas_in_its_conditions(row):
    sequence, tensor, gib = 2048, 8, 2**30
    layers, h, p, v = row["layers"], row["hidden"], row["pipeline"], row["chunks"]
    sbh = sequence * row["micro_batch"] * h
    kept = layers * (1 + (p - 1) / (p * v)) if v > 1 else layers
    scores = 5 * row["heads"] * sequence / (h * tensor)
    assert row["no_recompute_gib"] == pytest.approx(
        kept * sbh * (10 + 24 / tensor + scores) / gib, rel=1e-12
    )
    assert row["sequence_parallel_selective_gib"] == pytest.approx(
        kept * sbh * 34 / tensor / gib, rel=1e-12
    )
    states = 18 * 12 * layers * h * h / (tensor * p)
    assert row["params_and_optimizer_gib"] == pytest.approx(states / gib, rel=1e-12)


@pytest.mark.parametrize(
    "row", published_table("activation-memory-percent").rows, ids=lambda r: r["model"]
)
def test_activation_percentages_are_near_the_formula_for_one_layer(row):
    # The figure is not of one layer alone: it differs by up to 0.14 points.
    model = next(m for m in published_table("activation-memory").rows if m["model"] == row["model"])
    tensor = 8
    scores = 5 * model["heads"] * 2048 / model["hidden"]
    whole = 10 + (24 + scores) / tensor
    expected = [(34 + scores) / tensor, 10 + 24 / tensor, 34 / tensor, 2]
    printed = [row[c] for c in ("sequence_parallel", "selective", "sequence_parallel_selective")]
    for value, exact in zip([*printed, row["full"]], expected, strict=True):
        assert value == pytest.approx(100 * exact / whole, abs=0.15)


@pytest.mark.parametrize(
    "row", published_table("weak-scaling").rows, ids=lambda r: str(r["n_gpus"])
)
def test_weak_scaling_rows_have_the_parameters_that_their_shape_gives(row):
    layers, h, vocabulary, sequence = row["layers"], row["hidden"], 51200, 2048
    params = 12 * layers * h * h * (1 + 13 / (12 * h) + (vocabulary + sequence) / (12 * layers * h))
    assert params / 1e9 == pytest.approx(row["params_billion"], abs=0.06)
    assert row["n_gpus"] % (row["tensor"] * row["pipeline"]) == 0
    replicas = row["n_gpus"] // (row["tensor"] * row["pipeline"])
    assert row["global_batch"] % (replicas * row["micro_batch"]) == 0


def test_iteration_times_agree_with_their_stated_mfu():
    for row in published_table("iteration-time").rows:
        shape = next(
            m for m in published_table("activation-memory").rows if m["model"] == row["model"]
        )
        layers, h, vocabulary, sequence = shape["layers"], shape["hidden"], 51200, 2048
        # Model FLOPs per iteration, equation 7 of the same paper.
        flop = 72 * row["global_batch"] * layers * sequence * h * h
        flop *= 1 + sequence / (6 * h) + vocabulary / (12 * layers * h)
        rate = flop / row["sequence_parallel_selective_s"] / row["n_gpus"]
        assert 100 * rate / 312e12 == pytest.approx(row["mfu_percent"], abs=0.3)


def test_fsdp_drop_brackets_the_formula():
    (drop,) = (row["drop_gib"] for row in published_table("fsdp2-llama-3-8b-drop").rows)
    assert drop == pytest.approx(16 * 8.03e9 * (1 / 8 - 1 / 128) / 2**30, abs=0.05)
    peak = {
        (r["n_gpus"], r["compiled"]): r["peak_gib"]
        for r in published_table("fsdp2-llama-3-8b").rows
    }
    measured = sorted(peak[8, compiled] - peak[128, compiled] for compiled in (False, True))
    assert measured == pytest.approx([15.0, 15.4])


def test_seven_billion_on_eight_gpus_is_112_to_14_gb():
    states = [row["states_gb"] for row in published_table("model-states-7b").rows]
    assert states == [7 * 16, 7 * (4 + 12 / 8), 7 * (2 + 14 / 8), 7 * 16 / 8]


@pytest.mark.parametrize("table_id", ["all-reduce-h200", "all-reduce-a100"])
def test_message_sizes_double_from_32_kib_to_16_gib(table_id):
    sizes = [row["size_bytes"] for row in published_table(table_id).rows]
    assert sizes == [32 * 1024 * 2**i for i in range(20)]
    assert sizes[-1] == 16 * 2**30


@pytest.mark.parametrize(
    ("gpu_name", "row", "algorithm_gb_per_s"),
    [
        # The algorithm bandwidth that the sources print beside the columns kept here.
        ("h200", 0, 0.82),
        ("h200", 5, 22.82),
        ("h200", 12, 229.67),
        ("h200", 19, 275.58),
        ("a100", 0, 0.75),
        ("a100", 8, 62.82),
        ("a100", 19, 134.22),
    ],
)
def test_times_agree_with_the_algorithm_bandwidth_of_the_source(gpu_name, row, algorithm_gb_per_s):
    size_bytes, seconds = all_reduce_times(gpu_name)[row]
    assert size_bytes / seconds / 1e9 == pytest.approx(algorithm_gb_per_s, abs=0.006, rel=5e-4)


@pytest.mark.parametrize(
    ("table", "row", "mfu_percent", "peak"),
    [
        # The MFU that the source prints beside the throughput kept here.
        ("mpt-h100-80", {"model": "7b", "sequence": 2048, "n_gpus": 8}, 46.44, 989.5e12),
        ("mpt-h100-80", {"model": "1b", "sequence": 65536, "n_gpus": 8}, 26.34, 989.5e12),
        ("mpt-h100-80", {"model": "70b", "sequence": 2048, "n_gpus": 64}, 42.57, 989.5e12),
        ("mpt-a100-80", {"model": "125m", "sequence": 512, "n_gpus": 8}, 42.56, 312e12),
        ("mpt-a100-80", {"model": "30b", "sequence": 8192, "n_gpus": 8}, 39.38, 312e12),
        ("mpt-a100-40", {"model": "13b", "sequence": 2048, "n_gpus": 128}, 51.93, 312e12),
        ("mpt-a100-40", {"model": "350m", "sequence": 16384, "n_gpus": 8}, 51.78, 312e12),
    ],
)
def test_mpt_throughput_agrees_with_the_utilisation_of_the_source(table, row, mfu_percent, peak):
    (found,) = [r for r in published_table(table).rows if row.items() <= r.items()]
    config = next(
        run.arguments[0]
        for run in accuracy.runs(table)
        if run.name == f"{row['model']}, s {row['sequence']}, {row['n_gpus']} GPUs"
    )
    # Its README: 3 x (2 n_params + 4 layers x d_model x sequence) FLOP a token.
    flop = 6 * config.n_params + 12 * config.layers * config.hidden * row["sequence"]
    ours = 100 * flop * found["tokens_per_s_per_gpu"] / peak
    assert ours == pytest.approx(mfu_percent, rel=2e-3)


def test_in_switch_reduction_beats_the_one_way_link():
    assert published_table("all-reduce-h200").rows[-1]["busbw_gb_per_s"] > 450


def test_unknown_tables_and_gpus_offer_the_nearest():
    assert published_table("Weak-Scaling").id == "weak-scaling"
    with pytest.raises(ValueError, match="got 'zero-states'; did you mean .*zero-model-states"):
        published_table("zero-states")
    with pytest.raises(ValueError, match="gpu_name must be one of a100, h200, got 't4'"):
        all_reduce_times("t4")


def test_changing_a_row_changes_no_table():
    published_table("model-states-7b").rows[0]["states_gb"] = 0
    assert published_table("model-states-7b").rows[0]["states_gb"] == 112


def test_malformed_table_is_refused():
    good = published_table("model-states-7b")
    fields = {name: getattr(good, name) for name in Published.__dataclass_fields__}
    with pytest.raises(ValueError, match="model-states-7b: a row must have 2 values"):
        Published(**{**fields, "values": ((0, 112), (1,))})
    with pytest.raises(ValueError, match="tag must be one of formula, measured, got 'guess'"):
        Published(**{**fields, "tag": "guess"})
