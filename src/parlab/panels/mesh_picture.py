"""A world of GPUs drawn node by node: whom one rank talks to, on which axis, over which link."""

from parlab import svg
from parlab.hardware import Link
from parlab.mesh import AXES, Mesh
from parlab.panels.panel import Picture
from parlab.units import format_rate, require_int

# Of an HGX H100, inside a node and between nodes; constants, because reading the data sheet costs a
# browser time. A test compares them.
LINKS = (Link(2.96e-6, 450e9, "NVLink"), Link(5e-6, 50e9, "InfiniBand"))
LETTERS = {"tp": "T", "cp": "C", "dp": "D", "pp": "P", "zero": "z", "ep": "E", "edp": "X"}
NAMES = {"tp": "TP", "cp": "CP", "dp": "DP", "pp": "PP", "zero": "DP·CP", "ep": "EP", "edp": "EDP"}
FILLS = {  # colour and opacity of a square
    "tp": (svg.BLUE, 1),
    "cp": (svg.ORANGE, 1),
    "dp": (svg.GREEN, 1),
    "pp": (svg.INK, 0.2),
    "zero": (svg.GREEN, 0.3),
}
OUTLINES = {"ep": "", "edp": "3 3"}  # dashes around a square
MOST_GPUS, MOST_NODES, LARGEST_NODE = 64, 16, 72  # that a picture has room for
PITCH, SQUARE, PAD, GAP, LABEL, NARROWEST = 27, 24, 4, 9, 19, 113
WIDEST_LABEL = 14  # letters above the narrowest box
ROW = 21
COLUMNS = (  # of the table
    (28, "start", "axis"),
    (92, "start", "ranks of its group"),
    (334, "end", "in a node"),
    (svg.WIDTH - 4, "end", "slowest link"),
)


def mesh_picture(layout, gpus_per_node: int = 8, rank: int = 0, *, links=LINKS) -> Picture:
    """Draw the nodes of a layout with the groups of one rank, and say whom it talks to.

    A square is a GPU; its letter says in which group of the rank it is: T, C, D and P for tensor,
    context, data and pipeline parallel, z for the others of the data x context parallel group, over
    which gradients are averaged and ZeRO shards; then E for expert parallel, X for expert data
    parallel. Beyond 64 GPUs the nodes that hold its nearest partners are drawn, and the picture
    says what it leaves out.

    layout: has the degrees dp, tp, pp, cp and ep, such as a Layout or a Mesh. gpus_per_node: up to
    72. links: of a GPU inside its node, and to other nodes.

    >>> from parlab.mesh import Mesh
    >>> print(mesh_picture(Mesh(dp=2, tp=8, pp=4), rank=19).sentence)
    N = 64 GPUs, 8 a node (TP 8, PP 4, DP 2). Rank 19 talks over NVLink on TP to 16, 17, … 23; over InfiniBand on DP to 27, PP to 3, 35.
    """  # noqa: E501
    require_int("gpus_per_node", gpus_per_node, minimum=1, maximum=LARGEST_NODE)
    mesh = Mesh.of(layout, gpus_per_node)
    groups = {axis: mesh.group(axis, rank) for axis in LETTERS}
    drawn = _nodes_to_draw(mesh, groups, rank)
    sentence = _sentence(mesh, groups, rank, links)
    boxes = _Boxes(gpus_per_node)
    below = boxes.height
    marks = [
        *_squares(boxes, mesh, groups, rank, drawn),
        svg.text(4, below + 17, _left_out(mesh, groups, drawn), "start", 14),
        *_table(groups, links, below + 30),
    ]
    title = f"{mesh.world} GPUs in nodes of {gpus_per_node}, with the groups of rank {rank}"
    height = below + 30 + (len(LETTERS) + 1) * ROW + 8
    return Picture(svg.document(height, marks, title, sentence), sentence)


class _Boxes:
    """Where the boxes of nodes and the squares of their GPUs lie; equal for all worlds."""

    def __init__(self, gpus_per_node):
        self.per_node = gpus_per_node
        self.columns = min(gpus_per_node, 4 if gpus_per_node <= 16 else 16)
        self.most = min(MOST_NODES, max(1, MOST_GPUS // gpus_per_node))
        rows = -(-gpus_per_node // self.columns)
        self.box = (
            max(NARROWEST, self.columns * PITCH - (PITCH - SQUARE) + 2 * PAD),
            rows * PITCH - (PITCH - SQUARE) + 2 * PAD,
        )
        self.per_row = (svg.WIDTH + GAP) // (self.box[0] + GAP)
        self.row = LABEL + self.box[1] + GAP
        self.height = -(-self.most // self.per_row) * self.row

    def corner(self, number):
        """Top left of the box of the node that is drawn as the `number`th."""
        row, column = divmod(number, self.per_row)
        return 0.5 + column * (self.box[0] + GAP), LABEL + row * self.row

    def square(self, number, gpu):
        """Top left of the square of a GPU in that box."""
        left, top = self.corner(number)
        row, column = divmod(gpu, self.columns)
        return left + PAD + column * PITCH, top + PAD + row * PITCH


def _nodes_to_draw(mesh, groups, rank):
    """All nodes, or those with the rank and its nearest partners, each group in its turn."""
    most = _Boxes(mesh.gpus_per_node).most
    n_nodes = -(-mesh.world // mesh.gpus_per_node)
    if n_nodes <= most:
        return list(range(n_nodes))
    home = rank // mesh.gpus_per_node
    nearest = [
        iter(
            sorted(
                {each // mesh.gpus_per_node for each in group.ranks},
                key=lambda node: (abs(node - home), node),
            )
        )
        for axis, group in groups.items()
        if mesh.ep > 1 or axis not in OUTLINES
    ]
    chosen = {home}
    while nearest and len(chosen) < most:
        turn = nearest.pop(0)
        node = next((node for node in turn if node not in chosen), None)
        if node is not None:
            chosen.add(node)
            nearest.append(turn)
    return sorted(chosen)


def _kinds(mesh, groups):
    """{rank: group that fills its square} and {rank: group that outlines it}."""
    fills = {each: axis for axis in ("zero", *AXES) for each in groups[axis].ranks}
    outlines = {}
    if mesh.ep > 1:
        outlines = {each: axis for axis in OUTLINES for each in groups[axis].ranks}
    return fills, outlines


def _squares(boxes, mesh, groups, rank, drawn):
    fills, outlines = _kinds(mesh, groups)
    places, labels = {}, []
    for number, node in enumerate(drawn):
        left, top = boxes.corner(number)
        first = node * boxes.per_node
        last = min(first + boxes.per_node, mesh.world) - 1
        label = f"node {node}: {first}–{last}"
        if len(label) > WIDEST_LABEL:
            label = f"node {node}"
        labels.append(svg.text(left, top - 5, label, "start", 14))
        for gpu in range(last - first + 1):
            places[first + gpu] = boxes.square(number, gpu)
    frames = svg.boxes(map(boxes.corner, range(len(drawn))), *boxes.box)
    yield svg.stroke(frames, width=1, opacity=0.5)
    yield from labels
    yield svg.fill(svg.boxes(places.values(), SQUARE, SQUARE), svg.INK, 0.08)
    for axis, look in FILLS.items():
        corners = [at for each, at in places.items() if fills.get(each) == axis and each != rank]
        yield svg.fill(svg.boxes(corners, SQUARE, SQUARE), *look)
    yield svg.fill(svg.boxes([places[rank]], SQUARE, SQUARE))
    for axis, dash in OUTLINES.items():
        corners = [
            (x + 1.5, y + 1.5)
            for each, (x, y) in places.items()
            if outlines.get(each) == axis and each != rank
        ]
        yield svg.stroke(svg.boxes(corners, SQUARE - 3, SQUARE - 3), width=2, dash=dash)
    for each, (x, y) in places.items():
        kind = fills.get(each)
        letters = LETTERS.get(kind, "") + LETTERS.get(outlines.get(each), "")
        if letters:
            colour = svg.PAPER if each == rank else _ink(kind)
            letters = "R" if each == rank else letters
            yield svg.text(x + SQUARE / 2, y + 17, letters, size=14, colour=colour)


def _left_out(mesh, groups, drawn):
    """What the picture does not show, in a line."""
    n_nodes = -(-mesh.world // mesh.gpus_per_node)
    if len(drawn) == n_nodes:
        return "All nodes are drawn. R is the rank, letters as in the table."
    shown = set(drawn)
    fills, _ = _kinds(mesh, groups)
    missing = {}
    for each, axis in fills.items():
        if each // mesh.gpus_per_node not in shown:
            missing[axis] = missing.get(axis, 0) + 1
    words = ", ".join(f"{count} {LETTERS[axis]}" for axis, count in sorted(missing.items()))
    return f"Not drawn: {n_nodes - len(drawn)} of {n_nodes} nodes, with {words or 'no partner'}."


def _table(groups, links, top):
    yield from _row(top, [header for _, _, header in COLUMNS])
    for line, (axis, group) in enumerate(groups.items(), start=1):
        y = top + line * ROW
        if axis in FILLS:
            yield svg.fill(svg.boxes([(4, y)], 18, 18), *FILLS[axis])
        else:
            yield svg.stroke(svg.boxes([(5, y + 1)], 16, 16), width=2, dash=OUTLINES[axis])
        yield svg.text(13, y + 14, LETTERS[axis], size=14, colour=_ink(axis))
        size, link = len(group.ranks), links[group.crosses_node]
        yield from _row(
            y,
            (
                NAMES[axis],
                f"{size}: {_listed(group.ranks)}",
                f"{group.ranks_per_node} of {size}",
                f"{link.name}, {format_rate(link.bandwidth_bytes_per_s)}" if size > 1 else "none",
            ),
        )


def _row(top, cells):
    for (x, anchor, _), cell in zip(COLUMNS, cells, strict=True):
        yield svg.text(x, top + 14, cell, anchor, 14)


def _ink(axis):
    """The colour of a letter in the square of a group."""
    return svg.PAPER if axis in FILLS and FILLS[axis][1] == 1 else svg.INK


def _sentence(mesh, groups, rank, links):
    degrees = ((NAMES[axis], getattr(mesh, axis)) for axis in ("tp", "cp", "pp", "dp", "ep"))
    degrees = ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)
    axes = ["tp", "cp", "zero" if mesh.cp > 1 else "dp", "pp"]
    over = {link.name: [] for link in links}
    for axis in [*axes, "ep", "edp"] if mesh.ep > 1 else axes:
        partners = _partners(groups[axis], rank)
        nodes = {each // mesh.gpus_per_node for each in (rank, *partners)}
        if partners:
            link = links[len(nodes) > 1]
            over[link.name].append(f"{NAMES[axis]} to {_listed(partners)}")
    talk = "; ".join(f"over {name} on {', '.join(said)}" for name, said in over.items() if said)
    return (
        f"N = {mesh.world} GPU{'s' if mesh.world > 1 else ''}, {mesh.gpus_per_node} a node"
        f"{f' ({degrees})' if degrees else ''}. "
        f"Rank {rank} talks {talk or 'to no other'}."
    )


def _partners(group, rank):
    """The other ranks of the group; of a pipeline the stage before and the one behind."""
    if group.axis != "pp":
        return [each for each in group.ranks if each != rank]
    at = group.ranks.index(rank)
    return [*group.ranks[max(at - 1, 0) : at], *group.ranks[at + 1 : at + 2]]


def _listed(ranks):
    """Write ranks: up to four, or the first two and the last.

    >>> _listed([1, 2, 3]), _listed(range(8, 64, 8))
    ('1, 2, 3', '8, 16, … 56')
    """
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"
