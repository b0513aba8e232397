"""A pipeline's timeline as a Gantt chart: where its actions lie, and the paths that draw them.

Kinds differ in place and height within a rank's lane as well as in colour: F takes its upper part,
W its lower part, B and I all of it. Chunks differ in shade, the first is the darkest.
"""

from dataclasses import dataclass
from functools import cached_property
from math import floor

from parlab import svg
from parlab.pipeline.timeline import Timeline

LEFT, RIGHT = 44, 384
IDLE, PEAK = 434, 478  # right edges of the two columns
TOP, LANES = 50, 272  # all charts are equally high: the page around them keeps its layout
BOTTOM = TOP + LANES
HIGHEST_LANE = 68
KINDS = {  # colour; upper and lower edge within the lane
    "F": (svg.BLUE, 0, 0.66),
    "B": (svg.ORANGE, 0, 1),
    "I": (svg.ORANGE, 0, 1),
    "W": (svg.GREEN, 0.34, 1),
}
SHADES = (0.9, 0.55, 0.38, 0.24)  # opacity of the bars of each chunk
DIGIT, ROOM = 8, 2  # width of a digit in a bar, and of what stays free beside it


@dataclass(frozen=True)
class Gantt:
    """The chart of a timeline in F, a rank's forward pass.

    until: the end of its axis, where 1F1B on equal ranks ends or, if later, the timeline.
    """

    timeline: Timeline
    until: float

    @cached_property
    def x(self):
        """The scale of time."""
        return svg.Scale(0, self.until, LEFT, RIGHT)

    @property
    def pitch(self):
        """From one lane to the next."""
        return min(HIGHEST_LANE, LANES / self.timeline.schedule.p)

    @property
    def height(self):
        """Of one lane, without the gap below it."""
        return self.pitch - max(2, 0.12 * self.pitch)

    def top(self, rank):
        """The upper edge of a rank's lane."""
        return TOP + rank * self.pitch

    def edges(self, kind, rank):
        """The upper and the lower edge of the bars of a kind."""
        _, upper, lower = KINDS[kind]
        return self.top(rank) + upper * self.height, self.top(rank) + lower * self.height

    def place(self, x, y):
        """Return the rank and the time at a point, or None beside the lanes and after the end."""
        timeline = self.timeline
        rank = floor((y - TOP) / self.pitch)
        seconds = (x - LEFT) / (RIGHT - LEFT) * self.until
        inside = 0 <= rank < timeline.schedule.p and 0 <= seconds < timeline.makespan
        return (rank, seconds) if inside else None

    def box(self, kind, rank, start, end, around=0):
        """Path data of the outline of a bar, so far `around` it; that of B is as high as a lane."""
        upper, lower = self.edges(kind, rank)
        left, right = self.x(start) - around, self.x(end) + around
        return f"M{left:.1f} {upper - around:.1f}H{right:.1f}V{lower + around:.1f}H{left:.1f}Z"

    def marks(self):
        """The lanes, empty where a rank idles, and their bars: a path per rank, kind and chunk."""
        schedule, makespan = self.timeline.schedule, self.timeline.makespan
        corners = [(LEFT, self.top(rank)) for rank in range(schedule.p)]
        yield svg.fill(svg.boxes(corners, self.x(makespan) - LEFT, self.height), svg.INK, 0.08)
        bars = [path for rank in range(schedule.p) for path in self._bars(rank)]
        yield svg.stretched(bars, LEFT, (RIGHT - LEFT) / self.until)
        if self._numbers_fit():
            yield from self._numbers()

    def columns(self):
        """Idle of total and peak, in micro-batches, of each rank."""
        timeline = self.timeline
        idle = map(percent, timeline.rank_bubbles())
        peak = [f"{count / timeline.schedule.v:.3g}" for count in timeline.peak_in_flight]
        cells = [
            ("rank", "idle", "peak"),
            *zip(map(str, range(len(peak))), idle, peak, strict=True),
        ]
        for rank, row in enumerate(cells, start=-1):
            y = TOP - 8 if rank < 0 else self.top(rank) + self.height / 2 + 5
            for right, word in zip((LEFT - 6, IDLE, PEAK), row, strict=True):
                yield svg.text(right, y, word, "end", 14)

    def axis(self):
        """The end of the timeline, and that of 1F1B on equal ranks where it is later."""
        makespan = self.timeline.makespan
        below, end = self.top(self.timeline.schedule.p - 1) + self.height, self.x(makespan)
        yield svg.stroke(svg.line([(LEFT, below + 3), (end, below + 3), (end, TOP - 4)]), width=1.5)
        yield svg.text(LEFT, below + 20, "0, time in F", "start", 14)
        yield svg.text(end, below + 20, f"{makespan:.4g} F", "end", 14)
        if self.until - makespan > 1e-9 * self.until:
            later = svg.line([(RIGHT, TOP - 4), (RIGHT, below + 24)])
            yield svg.stroke(later, svg.INK, 1.5, "4 4", 0.8)
            yield svg.text(RIGHT, below + 38, f"1F1B: {self.until:.4g} F", "end", 14)

    def _bars(self, rank):
        timeline, gap = self.timeline, self.until / (RIGHT - LEFT)
        chunks = timeline.schedule.stages[rank]
        starts = {kind: [[] for _ in chunks] for kind in KINDS}
        row = zip(timeline.schedule.actions[rank], timeline.starts[rank], strict=True)
        for (kind, _, chunk), start in row:
            starts[kind][chunk].append(start)
        for kind, (colour, *_) in KINDS.items():
            upper, lower = self.edges(kind, rank)
            for chunk, stage in enumerate(chunks):
                length = timeline.times[kind][stage]
                length -= min(gap, length / 6)  # keeps neighbours apart
                path = svg.bars(starts[kind][chunk], upper, length, lower - upper)
                yield svg.fill(path, colour, SHADES[chunk])

    def _numbers_fit(self):
        schedule, times = self.timeline.schedule, self.timeline.times
        kinds = {kind for kind, _, _ in schedule.actions[0]}
        narrowest = min(min(times[kind]) for kind in kinds)
        room = narrowest * (RIGHT - LEFT) / self.until
        needed = DIGIT * len(str(schedule.m)) + ROOM
        return room >= needed and self.height >= svg.FONT_SIZE

    def _numbers(self):
        timeline = self.timeline
        for rank, row in enumerate(timeline.schedule.actions):
            times = zip(row, timeline.starts[rank], timeline.ends[rank], strict=True)
            for (kind, micro_batch, chunk), start, end in times:
                x, y = (self.x(start) + self.x(end)) / 2, sum(self.edges(kind, rank)) / 2 + 5
                colour = svg.INK if chunk else svg.PAPER
                yield svg.text(x, y, str(micro_batch + 1), size=14, colour=colour)


def percent(share):
    """Write a share with three significant digits, without an exponent.

    >>> percent(7 / 23), percent(15)
    ('30.4%', '1500%')
    """
    return f"{float(f'{100 * share:.3g}'):.12g}%"
