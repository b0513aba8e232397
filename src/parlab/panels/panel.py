"""What a what-if panel is: a pure function from slider values to a picture and a sentence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Slider:
    """One parameter and the values that it steps through.

    The values are listed, so a logarithmic slider is a list of round numbers, and a page, a
    notebook and a test all step through exactly the same ones.

    label: what stands beside the slider. shown, spoken: a value with its unit, as written beside
    the slider and as read aloud.
    count: how many of the values are allowed, given the values of the other sliders.
    """

    name: str
    label: str
    values: tuple
    default: int | float
    shown: Callable[[int | float], str]
    spoken: Callable[[int | float], str]
    count: Callable[[Mapping], int] | None = None

    def __post_init__(self):
        if self.default not in self.values:
            raise ValueError(f"default of {self.name} must be one of its values: {self.default}")

    def index(self, value: int | float) -> int:
        """Return the position of a value; ValueError with the nearest values otherwise."""
        if value in self.values:
            return self.values.index(value)
        known = isinstance(value, int | float)
        offered = sorted(self.values, key=lambda v: abs(v - value))[:3] if known else self.values
        raise ValueError(
            f"{self.name} must be a value of its slider, for instance "
            f"{', '.join(map(str, sorted(offered)))}, got {value!r}"
        )

    def n_allowed(self, values: Mapping) -> int:
        """Return how many values the slider offers beside those of the other sliders."""
        return self.count(values) if self.count else len(self.values)


@dataclass(frozen=True)
class Picture:
    """What a panel shows: an SVG document and one sentence with the current numbers."""

    svg: str
    sentence: str


class Pointed(NamedTuple):
    """What a reader points at in a picture.

    label: names it, empty for nothing. outline: path data around it, in the picture's units.
    trail: path data around what belongs to it. at: where arrow keys go on from, None for nowhere.
    """

    label: str
    outline: str
    trail: str
    at: tuple[int, int] | None


@dataclass(frozen=True)
class Panel:
    """A function with the sliders that drive it.

    title: names the group of sliders. function: keyword arguments (one per slider, and
    `constants`, which no slider moves) to a Picture.
    point: names a part of that picture: {"x": ..., "y": ...}, a point in its units, or {"at": ...,
    "keys": [...]}, the part before and the keys pressed since, and the same keyword arguments to a
    Pointed. hint: says that this can be done.
    """

    name: str
    title: str
    function: Callable[..., Picture]
    sliders: tuple[Slider, ...]
    constants: Mapping = field(default_factory=dict)
    point: Callable[..., Pointed] | None = None
    hint: str = ""

    def values(self, **chosen) -> dict:
        """Return every argument of the function: the chosen ones and the defaults of the rest."""
        defaults = {slider.name: slider.default for slider in self.sliders} | dict(self.constants)
        for name in chosen:
            if name not in defaults:
                raise TypeError(f"{self.name} has {', '.join(defaults)}, got {name}")
        values = defaults | chosen
        for slider in self.sliders:
            slider.index(values[slider.name])
        return values

    def at(self, indices: Mapping[str, int], constants: Mapping) -> dict:
        """Return the arguments for slider positions, each held within what the others allow."""
        values = {s.name: s.values[indices[s.name]] for s in self.sliders} | dict(constants)
        for slider in self.sliders:
            last = slider.n_allowed(values) - 1
            values[slider.name] = slider.values[min(indices[slider.name], last)]
        return values
