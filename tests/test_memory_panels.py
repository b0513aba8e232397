"""The panels of the memory chapters: published figures in their sentences, and honest advice."""

import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import product

import pytest

import parlab as pl
from parlab.memory.step import CUDA_CONTEXT_BYTES, training_memory
from parlab.panels import PANELS, sheet

SVG = "{http://www.w3.org/2000/svg}"
OURS = [PANELS[name] for name in ("zero_ladder", "recompute_bytes", "does_it_fit")]
FIG_1 = pl.published_table("activation-memory").rows
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
FIELDS = ("stage", "tp", "n_gpus")
BARS = ("After step", "Loss", "Backward", "Optimizer")
ROUNDED = 5e-3  # relative, of three significant digits


def labels(svg):
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


def bytes_said(words):
    """Every size that a text names, in bytes."""
    sizes = re.findall(r"([−\d.]+) ([kMGTP]?B)\b", words)
    return [float(number.replace("−", "-")) * UNITS[unit] for number, unit in sizes]


def ladder(**chosen):
    panel = PANELS["zero_ladder"]
    return panel.function(**panel.values(**chosen))


def layer(**chosen):
    panel = PANELS["recompute_bytes"]
    return panel.function(**panel.values(**chosen)).sentence


def fit(**chosen):
    panel = PANELS["does_it_fit"]
    return panel.function(**panel.values(**chosen))


@pytest.mark.parametrize("card", [card for card in sheet.CARDS if card != "40e9 B"])
def test_cards_have_the_usable_bytes_of_the_data_sheet(card):
    assert sheet.CARDS[card] == pl.gpu(card).usable_bytes


@pytest.mark.parametrize("model", [name for name in sheet.MODELS if not name.startswith("gpt")])
def test_models_have_the_shapes_of_the_data_sheet(model):
    assert sheet.MODELS[model] == replace(pl.model(model), name="", source="", as_of="")


@pytest.mark.parametrize("row", FIG_1, ids=lambda row: row["model"])
def test_gpts_have_the_shapes_of_korthikanti(row):
    config = sheet.MODELS[f"gpt-{row['model'].lower()}"]
    assert (config.layers, config.hidden, config.heads) == (
        row["layers"],
        row["hidden"],
        row["heads"],
    )
    assert config.n_params == pytest.approx(
        {"22B": 22e9, "175B": 175e9, "530B": 530e9, "1T": 1e12}[row["model"]], rel=0.02
    )


@pytest.mark.parametrize("panel", OURS, ids=lambda panel: panel.name)
def test_a_page_is_laid_out_once_because_no_setting_changes_a_height(panel):
    ends = [(slider.values[0], slider.values[-1]) for slider in panel.sliders]
    heights = set()
    for corner in product(*ends):
        indices = {s.name: s.values.index(v) for s, v in zip(panel.sliders, corner, strict=True)}
        picture = panel.function(**panel.at(indices, {}))
        heights.add(ET.fromstring(picture.svg).get("viewBox"))
        # Three lines of 600 CSS pixels hold 80 characters and more in common fonts.
        assert len(picture.sentence) <= 240, picture.sentence
    assert len(heights) == 1
    for slider in panel.sliders:
        assert len(slider.label) <= 13
        # Two lines beside a slider would move the picture.
        assert all(len(slider.shown(value)) <= 10 for value in slider.values)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "row", pl.published_table("zero-model-states").rows, ids=lambda r: f"{r['n_params']:.3g}"
)
def test_the_ladder_says_every_cell_of_the_zero_paper(row, stage):
    model = {7.5e9: "7.5B", 128e9: "128B", 1e12: "1T"}[row["n_params"]]
    said = ladder(model=model, n_gpus=row["n_gpus"], stage=stage).sentence
    total = bytes_said(said.split(" = ")[2])[0]
    assert total == pytest.approx(row[f"stage_{stage}_gb"] * 1e9, rel=ROUNDED)


@pytest.mark.parametrize(
    "stage, said",
    [
        (0, "weights 15 GB + gradients 15 GB + optimizer 90 GB = 120 GB"),
        (1, "weights 15 GB + gradients 15 GB + optimizer 1.41 GB = 31.4 GB"),
        (2, "weights 15 GB + gradients 234 MB + optimizer 1.41 GB = 16.6 GB"),
        (3, "weights 234 MB + gradients 234 MB + optimizer 1.41 GB = 1.88 GB"),
    ],
)
def test_the_parts_of_7_5b_on_64_gpus(stage, said):
    assert said in ladder(model="7.5B", n_gpus=64, stage=stage).sentence


def left_of(picture):
    """The row of the table that says what is left at each stage, in bytes."""
    written = labels(picture.svg)
    start = written.index("left") + 1
    return [bytes_said(cell)[0] for cell in written[start : start + 4]]


@pytest.mark.parametrize(
    "card, left",
    [
        pytest.param("40e9 B", [-72e9, 1.5e9, 13.75e9, 26e9], id="40 x 10^9 bytes, the seed's"),
        # 42,298,834,944 usable bytes less 112, 38.5, 26.25 and 14 GB
        pytest.param("a100-40", [-69.7e9, 3.8e9, 16.05e9, 28.3e9], id="usable bytes of an A100"),
    ],
)
def test_what_7b_on_8_gpus_leaves_of_a_40_gb_card(card, left):
    assert left_of(ladder(model="7B", n_gpus=8, card=card)) == pytest.approx(left, rel=ROUNDED)
    for stage, side in enumerate(("above", "below", "below", "below")):
        said = ladder(model="7B", n_gpus=8, card=card, stage=stage).sentence
        room = bytes_said(said.split(f" {side} the usable")[0])[-1]
        assert room == pytest.approx(abs(left[stage]), rel=ROUNDED)


@pytest.mark.parametrize(
    "card, first",
    [("t4", "stage 3"), ("40e9 B", "stage 1"), ("h100-sxm", "stage 1"), ("b200", "stage 0")],
)
def test_the_first_stage_of_7b_on_8_that_fits(card, first):
    # 112, 38.5, 26.25 and 14 GB against 15.6, 40, 84.9 and 191.5 GB
    assert f"First to fit: {first}." in ladder(model="7B", card=card).sentence


def test_where_no_stage_fits_the_ladder_says_so():
    assert ladder(model="1T", n_gpus=64, card="b200").sentence.endswith("No stage fits.")


@pytest.mark.parametrize(
    "recipe, stage, times",
    [
        ("mixed-precision", 2, "1"),
        ("mixed-precision", 3, "1.5"),
        # Gradients of 4 bytes and weights of 2: DP sends 2 g = 8, stage 2 g + w = 6, stage 3 8.
        ("fp32-gradients", 2, "0.75"),
        ("fp32-gradients", 3, "1"),
    ],
)
def test_the_traffic_beside_dp_depends_on_what_is_sent(recipe, stage, times):
    said = ladder(recipe=recipe, stage=stage).sentence
    assert f"Traffic: {times} x DP." in said


def test_the_traffic_of_7b_on_8_is_under_the_bars():
    # 2 (N-1)/N Psi = 1.75 Psi, stage 3 2.625 Psi, in bf16
    written = labels(ladder(model="7B", n_gpus=8).svg)
    start = written.index("sends") + 1
    assert written[start : start + 4] == ["1.75 Ψ"] * 3 + ["2.62 Ψ"]
    assert written[start + 4 : start + 8] == ["24.5 GB"] * 3 + ["36.8 GB"]


def test_one_gpu_sends_nothing():
    assert "Traffic: none." in ladder(n_gpus=1).sentence


def heights(svg, colour):
    """Heights of the bars of a colour that stand on the base or on each other."""
    paths = [p for p in ET.fromstring(svg).iter(f"{SVG}path") if colour in p.get("style")]
    bars = re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", max((p.get("d") for p in paths), key=len))
    return [float(bottom) - float(top) for bottom, top in bars]


def test_the_bars_are_as_high_as_their_bytes():
    picture = ladder(model="7B", n_gpus=8, card="h100-sxm")
    weights, gradients, optimizer = (heights(picture.svg, c) for c in ("blue", "orange", "green"))
    a_gigabyte = weights[0] / 14  # some 1.7 units, of coordinates with one decimal
    drawn = [[h / a_gigabyte for h in bars] for bars in (weights, gradients, optimizer)]
    assert drawn[0] == pytest.approx([14, 14, 14, 1.75], abs=0.3)
    assert drawn[1] == pytest.approx([14, 14, 1.75, 1.75], abs=0.3)
    assert drawn[2] == pytest.approx([84, 10.5, 10.5, 10.5], abs=0.3)


@pytest.mark.parametrize("row", FIG_1, ids=lambda row: row["model"])
@pytest.mark.parametrize(
    "choice, column",
    [
        ({"recompute": "none", "sequence_parallel": False}, "no_recompute_gib"),
        ({"recompute": "selective", "sequence_parallel": True}, "sequence_parallel_selective_gib"),
    ],
    ids=["no recompute", "SP and selective"],
)
def test_a_layer_keeps_what_figure_1_of_korthikanti_has(row, choice, column):
    p, v = row["pipeline"], row["chunks"]
    held = row["layers"] * (1 + (p - 1) / (p * v) if v > 1 else 1)
    said = layer(
        model=f"gpt-{row['model'].lower()}", micro_batch=row["micro_batch"], tp=8, **choice
    )
    kept = bytes_said(said.split("a layer keeps ")[1])[0]
    assert kept == pytest.approx(row[column] * 2**30 / held, rel=ROUNDED)


@pytest.mark.parametrize(
    "model, share", [("gpt-175b", 80 / 114), ("gpt-530b", 64 / 98)], ids=["GPT-3", "MT-NLG"]
)
def test_selective_recomputation_saves_70_and_65_percent(model, share):
    said = layer(model=model, sequence=2048, tp=1, recompute="selective")
    assert f"{100 * share:.1f}% less than" in said


def test_with_a_flash_kernel_selective_recomputation_saves_almost_nothing():
    # GPT-3: 4 bytes a head and token, 4a/h = 0.03125 in units of sbh, beside 34.
    said = layer(model="gpt-175b", sequence=2048, tp=1, flash=True, recompute="selective")
    assert f"{100 * 0.03125 / 34.03125:.3g}% less than" in said


@pytest.mark.parametrize(
    "model, sequence, percent",
    [
        # 4 s^2 h again beside 72 s h^2 + 12 s^2 h (Korthikanti, appendix A, without the head).
        pytest.param(
            "gpt-175b", 2048, 100 * 4 * 2048 / (72 * 12288 + 12 * 2048), id="0.9% of GPT-3"
        ),
        # SwiGLU and 8 of 32 heads with keys: 2 (2.5 h^2 + 3 h f) a token, three times.
        pytest.param(
            "llama-3-8b",
            8192,
            100 * 4 * 8192 * 4096 / (6 * 4096 * (2.5 * 4096 + 3 * 14336) + 12 * 8192 * 4096),
            id="Llama 3",
        ),
    ],
)
def test_what_selective_recomputation_costs(model, sequence, percent):
    said = layer(model=model, sequence=sequence, recompute="selective")
    assert f"Backward runs the scores again: {percent:.3g}% more compute." in said


def test_full_recomputation_is_a_third_forward_again_and_keeps_2_of_114_sbh():
    said = layer(model="gpt-175b", tp=1, sequence_parallel=False, recompute="full")
    assert f"{100 * 112 / 114:.1f}% less than" in said
    assert "Backward runs forward again: 33.3% more compute." in said
    assert bytes_said(said.split("keeps ")[1])[0] == pytest.approx(2 * 2048 * 12288, rel=ROUNDED)


@pytest.mark.parametrize(
    "choice, rows",
    [
        pytest.param(
            {"recompute": "none"}, {"attention": "11", "scores": "80", "MLP": "19", "norms": "4"},
            id="none",
        ),
        pytest.param(
            {"recompute": "selective"},
            {"attention": "11", "scores": "0 of 80", "MLP": "19", "norms": "4"},
            id="selective",
        ),
        pytest.param(
            {"recompute": "full"},
            {"attention": "0 of 11", "scores": "0 of 80", "MLP": "0 of 19", "norms": "2 of 4"},
            id="full",
        ),
    ],
)  # fmt: skip
def test_the_rows_of_gpt_3_are_11_80_19_and_4_sbh(choice, rows):
    panel = PANELS["recompute_bytes"]
    written = labels(panel.function(**panel.values(model="gpt-175b", tp=1, **choice)).svg)
    for kind, sbh in rows.items():
        assert written[written.index(kind) + 1].startswith(f"{sbh} sbh = ")


def drawn_length(svg, colour):
    """Length of all bars of a colour together, without legend."""
    paths = [p for p in ET.fromstring(svg).iter(f"{SVG}path") if colour in p.get("style")]
    widths = [float(w) for p in paths for w in re.findall(r"h([\d.]+)v20\.0", p.get("d"))]
    return sum(widths)


def test_kept_and_dropped_bars_are_as_long_as_their_bytes():
    panel = PANELS["recompute_bytes"]
    choice = {"model": "gpt-175b", "tp": 1, "recompute": "selective"}
    svg = panel.function(**panel.values(**choice)).svg
    # 34 of 114 sbh; the gaps between 15 boxes are 1.5 units each at most.
    longest = 472
    assert drawn_length(svg, "blue") == pytest.approx(34 / 80 * longest, abs=13 * 1.5)
    assert drawn_length(svg, "orange") == pytest.approx(longest, abs=3 * 1.5)


def settings(count, seed=4):
    """Random settings of the panel, the same in every run."""
    draw = random.Random(seed)
    panel = PANELS["does_it_fit"]
    for _ in range(count):
        yield panel.at({s.name: draw.randrange(len(s.values)) for s in panel.sliders}, {})


def table_of(picture):
    """The panel's table: bytes at the peak and after the step, by row."""
    written = labels(picture.svg)
    start = written.index("after the step") + 1
    rows = [written[i : i + 3] for i in range(start, len(written), 3)]
    return {name: (bytes_said(at_peak)[0], bytes_said(after)[0]) for name, at_peak, after in rows}


@pytest.mark.parametrize(
    "stage, weights, gradients, optimizer",
    [
        pytest.param(0, 2, 2, 12, id="DP"),
        pytest.param(1, 2, 2, 12 / 8, id="stage 1"),
        pytest.param(2, 2, 2 / 8, 12 / 8, id="stage 2"),
        pytest.param(3, 2 / 8, 2 / 8, 12 / 8, id="stage 3"),
    ],
)
def test_states_of_llama_3_8b_on_8_gpus_are_the_stages_of_zero(
    stage, weights, gradients, optimizer
):
    n_params = 8_030_261_248  # of the published checkpoint
    table = table_of(fit(model="llama-3-8b", n_gpus=8, stage=stage))
    for row, each in (("weights", weights), ("gradients", gradients), ("optimizer", optimizer)):
        assert table[row][1] == pytest.approx(each * n_params, rel=ROUNDED)


def test_mixtral_holds_all_its_experts_though_a_token_uses_two():
    table = table_of(fit(model="mixtral-8x7b", n_gpus=8, stage=3))
    # 46,702,792,704 parameters in all; the active ones alone would give 3.2 GB of weights.
    assert table["weights"][1] == pytest.approx(2 * 46_702_792_704 / 8, rel=ROUNDED)


@pytest.mark.parametrize("setting", list(settings(12, seed=1)), ids=lambda s: s["model"])
def test_the_rows_sum_to_the_bar_and_to_the_sentence(setting):
    picture = PANELS["does_it_fit"].function(**setting)
    table = table_of(picture)
    for moment in (0, 1):
        together = table["together"][moment]
        rows = sum(sizes[moment] for name, sizes in table.items() if name != "together")
        assert rows == pytest.approx(together, rel=ROUNDED)
    written = labels(picture.svg)
    bars = {name: bytes_said(written[written.index(name) + 1])[0] for name in BARS}
    assert table["together"] == (max(bars.values()), bars["After step"])
    room, side = re.search(r"([\d.]+ .?B) (above|below) the usable", picture.sentence).groups()
    over = table["together"][0] - sheet.CARDS[setting["card"]]
    assert side == ("above" if over > 0 else "below")
    assert bytes_said(room)[0] == pytest.approx(abs(over), rel=ROUNDED, abs=1e9)
    moment = re.search(r"at the peak \((.*?)\)", picture.sentence).group(1)
    assert bars[moment.replace("the ", "").capitalize()] == max(bars.values())


def peak(setting):
    """The peak of a setting of the panel, from the package's own function."""
    return training_memory(
        sheet.MODELS[setting["model"]],
        setting["micro_batch"],
        sequence=setting["sequence"],
        n_gpus=setting["n_gpus"] // setting["tp"],
        stage=setting["stage"],
        tp=setting["tp"],
        sequence_parallel=setting["tp"] > 1,
        recompute=setting["recompute"],
        context_bytes=CUDA_CONTEXT_BYTES,
    ).peak


COST = {  # of a slider's new value: the order that the panel promises
    "stage": {1: 0, 2: 0, 3: 2},
    "recompute": {"selective": 1, "full": 4},
    "micro_batch": dict.fromkeys((1, 2, 4, 8), 3),
    "tp": dict.fromkeys((2, 4, 8), 5),
    "n_gpus": dict.fromkeys((2**k for k in range(1, 11)), 6),
}


def every_change(setting):
    """All ways to move one slider towards less memory, as (rank, distance, slider, value)."""
    panel = PANELS["does_it_fit"]
    for slider in panel.sliders:
        if slider.name not in COST:
            continue
        here = slider.values.index(setting[slider.name])
        for there, value in enumerate(slider.values):
            towards_less = there < here if slider.name == "micro_batch" else there > here
            if towards_less:
                yield COST[slider.name][value], abs(there - here), slider.name, value


def cheapest_by_trying_all(setting, usable):
    """The cheapest one or two changes that fit, tried without any short cut."""
    config = sheet.MODELS[setting["model"]]

    def fits(changed):
        n_gpus, tp = changed["n_gpus"], changed["tp"]
        sizes = (config.heads, config.kv_heads, config.ffn, config.vocab)
        possible = tp <= n_gpus and not any(size % tp for size in sizes)
        return possible and peak(changed) <= usable

    changes = sorted(every_change(setting))
    for change in changes:
        if fits(setting | {change[2]: change[3]}):
            return [change]
    pairs = [(b, a) for i, a in enumerate(changes) for b in changes[i + 1 :] if a[2] != b[2]]
    for b, a in sorted(pairs):
        if fits(setting | {a[2]: a[3], b[2]: b[3]}):
            return [a, b]
    return None


def least_of_all(setting):
    """The smallest peak that the sliders reach with this model and sequence."""
    config = sheet.MODELS[setting["model"]]
    choices = product((0, 1, 2, 3), (1, 2, 4, 8), (2**k for k in range(11)))
    return min(
        peak(
            setting
            | {"micro_batch": 1, "recompute": "full"}
            | dict(zip(FIELDS, choice, strict=True))
        )
        for choice in choices
        if choice[1] <= choice[2] and config.kv_heads % choice[1] == 0
    )


def advised(sentence):
    """The changes that a sentence names, as {slider: value}, and the peak that it promises."""
    words, promised = re.search(r"Cheapest fit: (.*), ([\d.]+ [kMGTP]?B)\.$", sentence).groups()
    moves = {}
    for pattern, slider in (
        (r"stage (\d)", "stage"),
        (r"b = (\d+)", "micro_batch"),
        (r"TP (\d)", "tp"),
        (r"N = (\d+)", "n_gpus"),
        (r"(\w+) recompute", "recompute"),
    ):
        for value in re.findall(pattern, words):
            moves[slider] = int(value) if value.isdigit() else value
    assert len(moves) == 1 + words.count(" and ")
    return moves, bytes_said(promised)[0]


@pytest.mark.parametrize(
    "setting", list(settings(60)), ids=lambda s: "-".join(map(str, s.values()))
)
def test_the_advice_is_the_cheapest_change_that_fits(setting):
    panel = PANELS["does_it_fit"]
    usable = sheet.CARDS[setting["card"]]
    said = panel.function(**setting).sentence
    expected = cheapest_by_trying_all(setting, usable)
    if peak(setting) <= usable:
        assert said.endswith("It fits.")
    elif expected is None:
        least = least_of_all(setting)
        assert ("Nothing that these sliders do makes it fit." in said) == (least > usable)
        if least <= usable:
            promised = re.search(r"No two changes make it fit, all together do: (.*)\.$", said)
            assert bytes_said(promised.group(1))[0] == pytest.approx(least, rel=ROUNDED)
    else:
        moves, promised = advised(said)
        assert moves == {slider: value for _, _, slider, value in expected}
        then = panel.function(**setting | moves).sentence
        assert then.endswith("It fits.")
        assert promised == pytest.approx(peak(setting | moves), rel=ROUNDED)


SMALL = {"model": "llama-2-7b", "sequence": 2048, "n_gpus": 8, "card": "h100-sxm"}


@pytest.mark.parametrize(
    "chosen, said",
    [
        pytest.param({"stage": 3, "n_gpus": 64}, "It fits.", id="fits"),
        # 6.74e9 parameters: 108 GB; stage 1 leaves 4 + 12 / 8 = 5.5 bytes each, 37 GB.
        pytest.param(SMALL, "Cheapest fit: stage 1 (no more traffic), ", id="a stage"),
        # Alone no stage helps, nor do more replicas.
        pytest.param(
            SMALL | {"n_gpus": 1},
            " and N = 2, ",
            id="one GPU has nothing to shard over",
        ),
        # 2 x 1e12 bytes of weights alone against 15.6 GB; over 1024 GPUs 16 GB of states.
        pytest.param(
            {"model": "gpt-1t", "card": "t4", "n_gpus": 1}, "Nothing that these sliders do", id="no"
        ),
    ],
)
def test_the_advice_for_known_cases(chosen, said):
    assert said in fit(**chosen).sentence


def test_the_tp_slider_ends_where_a_layer_or_the_gpus_cannot_be_cut_further():
    tp = next(slider for slider in PANELS["does_it_fit"].sliders if slider.name == "tp")
    allowed = {
        ("llama-3-8b", 8): 4,  # 1, 2, 4 and 8: eight heads of keys and values
        ("llama-3-8b", 2): 2,
        ("qwen2.5-0.5b", 8): 2,  # two heads of keys and values
    }
    for (model, n_gpus), count in allowed.items():
        assert tp.n_allowed({"model": model, "n_gpus": n_gpus}) == count


@pytest.mark.parametrize(
    "panel, chosen, said",
    [
        pytest.param("zero_ladder", {"stage": 4}, "stage .* from 0 to 3, got 4", id="stage 4"),
        pytest.param("zero_ladder", {"n_gpus": 0}, "n_gpus .* from 1", id="no GPUs"),
        pytest.param("zero_ladder", {"model": "llama-3"}, "did you mean llama-3", id="model"),
        pytest.param("zero_ladder", {"recipe": "adam"}, "recipe must be one of", id="recipe"),
        pytest.param("does_it_fit", {"card": "h100"}, "did you mean .*h100-sxm", id="card"),
        pytest.param("does_it_fit", {"n_gpus": 4, "tp": 8}, "tp must divide n_gpus", id="TP"),
        pytest.param("does_it_fit", {"n_gpus": 6, "tp": 4}, "tp must divide n_gpus", id="rest"),
        pytest.param("does_it_fit", {"sequence": 0}, "sequence .* at least 1", id="no tokens"),
        pytest.param("recompute_bytes", {"recompute": "some"}, "one of none", id="recompute"),
        pytest.param("recompute_bytes", {"tp": 3}, "tp must divide", id="three"),
        pytest.param("recompute_bytes", {"model": "mixtral-8x7b"}, "model must be", id="experts"),
    ],
)
def test_a_panel_names_what_it_does_not_allow(panel, chosen, said):
    panel = PANELS[panel]
    with pytest.raises(ValueError, match=said):
        panel.function(**panel.values() | chosen)
