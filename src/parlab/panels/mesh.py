"""The mesh of a layout as a panel: move the degrees and the rank, and see whom it talks to."""

from parlab.mesh import Mesh
from parlab.panels.mesh_picture import mesh_picture
from parlab.panels.panel import Panel, Picture, Slider
from parlab.units import require_int

GPUS = tuple(2**k for k in range(3, 10))
DEGREES = tuple(2**k for k in range(6))
CUTS = ("tp", "cp", "pp")  # what data parallelism leaves of the GPUs


def mesh(
    n_gpus: int, tp: int, cp: int, pp: int, ep: int, rank: int, gpus_per_node: int = 8
) -> Picture:
    """Draw `mesh_picture` of so many GPUs; those that tp, cp and pp leave are data parallel.

    Raises ValueError where the degrees do not divide the GPUs.

    >>> print(mesh(64, 4, 2, 1, 8, 0).sentence)
    N = 64 GPUs, 8 a node (TP 4, CP 2, DP 8, EP 8). Rank 0 talks over NVLink on TP to 1, 2, 3, CP to 4; over InfiniBand on DP·CP to 4, 8, … 60, EP to 4, 8, … 28, EDP to 32.
    """  # noqa: E501
    layer = Mesh(tp=tp, cp=cp, pp=pp)
    if require_int("n_gpus", n_gpus, minimum=1) % layer.world:
        raise ValueError(
            f"tp x cp x pp = {layer.world} must divide n_gpus = {n_gpus}: the rest is data parallel"
        )
    dp = n_gpus // layer.world
    return mesh_picture(Mesh(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep), gpus_per_node, rank)


def _n_degrees(values, axis):
    """How many of DEGREES an axis may take, beside the sliders before its own."""
    before = CUTS if axis == "ep" else CUTS[: CUTS.index(axis)]
    left = values["n_gpus"] * (values["cp"] if axis == "ep" else 1)
    for other in before:
        left //= values[other]
    return sum(degree <= left for degree in DEGREES)


def _degree(axis, label, default, spoken):
    return Slider(
        axis, label, DEGREES, default, str, spoken, count=lambda values: _n_degrees(values, axis)
    )


PANEL = Panel(
    name="mesh",
    title="Which rank talks to whom",
    function=mesh,
    sliders=(
        Slider("n_gpus", "GPUs N", GPUS, 64, str, "{} GPUs".format),
        _degree("tp", "TP degree", 4, "{} GPUs share a layer".format),
        _degree("cp", "CP degree", 2, "{} GPUs share a sequence".format),
        _degree("pp", "PP degree", 2, "{} stages".format),
        _degree("ep", "EP degree", 1, "{} GPUs share the experts".format),
        Slider(
            "rank",
            "Rank",
            tuple(range(GPUS[-1])),
            0,
            str,
            "rank {}".format,
            count=lambda values: values["n_gpus"],
        ),
    ),
    constants={"gpus_per_node": 8},
)
