"""Expert parallelism: a layer's all-to-alls beside its compute, against the size of the group."""

from parlab import svg
from parlab.expert_traffic import expert_parallel_traffic
from parlab.hardware import Link
from parlab.memory.states import expert_zero_memory
from parlab.models import ModelConfig
from parlab.panels.panel import Panel, Picture, Slider
from parlab.units import format_bytes, format_seconds, require_int

GPUS, NODE = 64, 8
DEGREES = (1, 2, 4, 8, 16, 32, 64)
HIDDEN, TOKENS = 4096, 4096  # neither changes how the two times compare
# Constants, because reading the data sheet costs a browser time; a test compares them with it.
FLOP_PER_S, EFFICIENCY, CARD = 989.4e12, 0.4, "H100"
LINK, NETWORK = Link(2.96e-6, 450e9, "NVLink 4"), Link(5e-6, 50e9, "InfiniBand 400G")
HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 400, 86, 340, 66, svg.WIDTH - 24


def expert_cost(ep: int, experts: int, active: int, ffn: int, load: float) -> Picture:
    """Draw the time that a layer's experts compute and wait for tokens, forward and backward.

    ep: GPUs that share a layer's experts, 1 to 64. experts, active, ffn: E, e, f. load: copies on
    the busiest GPU over the mean; 1 where nothing is shared. Gated experts, h = 4096, 4096 tokens a
    GPU in bf16, even but for the load; groups larger than a node of 8 use each GPU's network port.

    >>> print(expert_cost(8, 8, 2, 14336, 1).sentence)
    N = 64 GPUs, ep = 8: 8 experts of width 14336, 2 for a token, load 1. In 4 all-to-alls a GPU sends 235 MB in 605 µs; its experts compute for 21.9 ms (H100 at 40% of its dense bf16 peak). Sending is 3% of the time. A layer's experts take 969 MB of states on a GPU under ZeRO-1.
    """  # noqa: E501
    require_int("ep", ep, minimum=1, maximum=GPUS)
    config = ModelConfig(
        layers=1,
        hidden=HIDDEN,
        heads=1,
        vocab=1,
        ffn=ffn,
        gated=True,
        biases=(),
        experts=experts,
        active_experts=active,
    )
    degrees = [n for n in DEGREES if n <= experts]
    traffic = {n: _traffic(config, n, load) for n in {*degrees, ep}}
    flops = 3 * config.flops_per_token(1).mlp * TOKENS
    compute = {n: (load if n > 1 else 1) * flops / (EFFICIENCY * FLOP_PER_S) for n in traffic}
    states = expert_zero_memory(config, GPUS, 1, expert_parallel=ep).experts.total
    shape = f"{experts} experts of width {ffn}, {active} for a token"
    sentence = _sentence(ep, shape, load, traffic[ep], compute[ep], states)

    sends = {n: traffic[n].seconds for n in traffic if n > 1}
    everything = [*compute.values(), *sends.values()]
    x = svg.Scale(DEGREES[0], DEGREES[-1], LEFT, RIGHT, log=True)
    y = svg.Scale(min(everything) / 1.6, max(everything) * 1.6, BOTTOM, TOP, log=True)
    edge = x(NODE * 2**0.5)  # half-way between 8 and 16
    inside = [(x(n), y(sends[n])) for n in degrees if 1 < n <= NODE]
    outside = [(x(n), y(sends[n])) for n in degrees if n > NODE]
    here = [(x(ep), y(sends[ep]))] if ep > 1 else []
    marks = [
        svg.fill(f"M{edge:.1f} {TOP}H{RIGHT}V{BOTTOM}H{edge:.1f}z", svg.INK, 0.07),
        svg.text((LEFT + edge) / 2, TOP + 18, "inside a node"),
        svg.text((edge + RIGHT) / 2, TOP + 18, "across nodes"),
        svg.axes(
            x,
            y,
            [(n, str(n)) for n in DEGREES],
            [(seconds, format_seconds(seconds)) for seconds in svg.decades(y.low, y.high)],
            "GPUs that share a layer's experts (ep)",
            "time per layer, forward and backward",
        ),
        svg.stroke(svg.line([(x(ep), BOTTOM), (x(ep), TOP)]), svg.INK, 1.5, "4 4", 0.7),
        svg.stroke(svg.line((x(n), y(compute[n])) for n in degrees), svg.BLUE, 3),
        svg.stroke(svg.line(inside), svg.ORANGE, 3, "9 5"),
        svg.stroke(svg.line(outside) if outside else "", svg.ORANGE, 3, "9 5"),
        svg.fill(svg.dots([(x(ep), y(compute[ep]))], 6), svg.BLUE),
        svg.fill(svg.dots(here, 6), svg.ORANGE),
        svg.stroke(svg.line([(6, 18), (44, 18)]), svg.BLUE, 3),
        svg.text(50, 23, "experts compute", "start"),
        svg.stroke(svg.line([(6, 40), (44, 40)]), svg.ORANGE, 3, "9 5"),
        svg.text(50, 45, "4 all-to-alls", "start"),
    ]
    title = f"Time per layer of experts on groups of {ep} GPUs"
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


def _traffic(config, ep, load):
    return expert_parallel_traffic(
        config,
        1,
        sequence=TOKENS,
        ep=ep,
        load=load if ep > 1 else 1,
        link=LINK,
        network=NETWORK,
        ranks_per_node=NODE,
    )


def _sentence(ep, shape, load, traffic, compute, states):
    card = f"({CARD} at {EFFICIENCY:.0%} of its dense bf16 peak)"
    start = f"N = {GPUS} GPUs, ep = {ep}: {shape}"
    end = f"A layer's experts take {format_bytes(states)} of states on a GPU under ZeRO-1."
    if ep == 1:
        return (
            f"{start}. Each GPU has all experts and sends no tokens; "
            f"they compute for {format_seconds(compute)} {card}. {end}"
        )
    away = traffic.network_bytes
    over = f", {format_bytes(away)} of it to other nodes," if away else ""
    share = traffic.seconds / (traffic.seconds + compute)
    return (
        f"{start}, load {load:g}. In {traffic.count} all-to-alls a GPU sends "
        f"{format_bytes(traffic.bytes_per_rank)}{over} in {format_seconds(traffic.seconds)}; its "
        f"experts compute for {format_seconds(compute)} {card}. Sending is {share:.0%} of the "
        f"time. {end}"
    )


def _no_more_than_experts(values):
    return sum(degree <= values["experts"] for degree in DEGREES)


PANEL = Panel(
    name="expert_cost",
    title="Expert parallelism: all-to-alls and compute per layer",
    function=expert_cost,
    sliders=(
        Slider(
            "ep",
            "Group ep",
            DEGREES,
            8,
            str,
            "groups of {}".format,
            count=_no_more_than_experts,
        ),
        Slider("experts", "Experts E", (16, 32, 64, 128, 256), 64, str, "{} experts".format),
        Slider("active", "Active e", (1, 2, 4, 8), 2, str, "{} for each token".format),
        Slider(
            "ffn",
            "Width f",
            (1024, 1792, 2048, 4096, 8192, 14336),
            4096,
            str,
            "experts of width {}".format,
        ),
        Slider(
            "load",
            "Busiest GPU",
            (1, 1.1, 1.25, 1.5, 2),
            1.1,
            "{:g} x the mean".format,
            "{:g} times the mean load".format,
        ),
    ),
)
