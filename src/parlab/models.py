"""Transformers as shapes: parameters and FLOP per token derive from a handful of sizes.

`data/models.toml` holds the shapes of well-known models, each with its source. In formulas L is
layers, h hidden, a heads, k kv_heads, d head_size, f ffn, V vocab, E experts, s sequence.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from parlab.units import require_bool, require_choice, require_int

BIAS_PLACES = ("qkv", "attention_output", "mlp")
MAX_SIZE, MAX_PARAMS = 10**9, 10**15


class Parameters(NamedTuple):
    """Number of parameters by kind."""

    embedding: int
    positions: int
    attention: int
    mlp: int  # of all experts
    router: int
    norms: int  # two a layer and the last one
    head: int  # 0 if tied

    @property
    def total(self):
        """All items together."""
        return sum(self)


class LayerParts(NamedTuple):
    """Parameters of one layer by what parallelism does with them."""

    cut: int  # matrices and biases that tensor parallelism divides
    whole: int  # norms, router and the biases added after a sum over ranks: the same on each
    expert_cut: int  # the same two of all experts, which expert parallelism divides besides
    expert_whole: int

    @property
    def total(self):
        """All parts together."""
        return sum(self)


class TokenFlops(NamedTuple):
    """FLOP of one token's forward pass by kind; a multiplication and an addition are 2."""

    attention: int
    scores: int  # the two products of attention that have no weights
    mlp: int  # of the active experts
    router: int
    head: int  # tied or not

    @property
    def forward(self):
        """All items together."""
        return sum(self)

    @property
    def training(self):
        """3 x forward: backward has two products for each, one for either factor's gradient."""
        return 3 * self.forward


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer, all layers alike; GPT-2's kind if not told.

    vocab: V, rows of the embedding, padding included if the model has it.
    kv_heads: k, heads of keys and values, must divide heads; None is a.
    head_dim: d, features of a head; None is h / a, and then heads must divide hidden.
    ffn: f, width between the matrices of an MLP, or of one expert; None is 4 h.
    gated: three matrices (SwiGLU) instead of two (GeLU).
    biases: which of "qkv", "attention_output" and "mlp" have them. Router and head have none.
    positions: longest sequence of learned positions; None adds no parameters (rotary).
    tied: the head uses the embedding's weight.
    norm: "layer" (weight and bias) or "rms" (weight only); two a layer and one at the end.
    experts, active_experts: E, and how many a token uses; several bring a router of h E a layer.

    kv_heads and ffn are filled in: give `dataclasses.replace` new ones with new heads or hidden.
    TypeError or ValueError for a size that is no int from 1 to 10^9, does not divide where it
    must, or gives more than 10^15 parameters in all.

    >>> ModelConfig(layers=12, hidden=768, heads=12, vocab=50257, positions=1024).n_params
    124439808
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    gated: bool = False
    biases: tuple = BIAS_PLACES
    positions: int | None = None
    tied: bool = True
    norm: str = "layer"
    experts: int = 1
    active_experts: int | None = None
    name: str = ""
    source: str = ""
    as_of: str = ""

    def __post_init__(self):
        for field in ("layers", "hidden", "heads", "vocab", "experts"):
            self._check_size(field)
        self._check_size("kv_heads", default=self.heads)
        self._check_size("ffn", default=4 * self.hidden)
        only = 1 if self.experts == 1 else None
        self._check_size("active_experts", only, self.experts, "so many experts a token uses")
        for field in ("head_dim", "positions"):
            if getattr(self, field) is not None:
                self._check_size(field)
        for field in ("gated", "tied"):
            require_bool(field, getattr(self, field))
        object.__setattr__(self, "norm", require_choice("norm", self.norm, ("layer", "rms")))
        object.__setattr__(self, "biases", _require_places(self.biases))
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"heads must divide hidden = {self.hidden} unless head_dim is given, "
                f"got {self.heads}: every head works on hidden / heads of the features"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads = {self.heads}, got {self.kv_heads}: groups are equal"
            )
        if self.n_params > MAX_PARAMS:
            raise ValueError(f"n_params must be at most 10^15, got {self.n_params:.2e} of {self}")

    def __hash__(self):
        return self._hash

    @cached_property
    def _hash(self):
        """Of ints alone, whose hashes are the same in every process that it is sent to."""
        sizes = (self.layers, self.hidden, self.heads, self.vocab, self.kv_heads, self.ffn)
        return hash((*sizes, self.experts))

    @property
    def head_size(self):
        """d = head_dim, or h / a."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @cached_property
    def parameters(self):
        """Parameters by kind, as a record that sums to n_params.

        attention = L (2 a d h + 2 k d h), mlp = L E (2 or, gated, 3) h f, plus the biases. For
        GPT's kind without the last norm: 12 L h^2 (1 + 13 / 12h + (V + s) / 12Lh), Narayanan et al.
        (arXiv 2104.04473), eq. 2.
        """
        h, f, d = self.hidden, self.ffn, self.head_size
        attention, expert, router = self._matrices
        if "qkv" in self.biases:
            attention += (self.heads + 2 * self.kv_heads) * d
        if "attention_output" in self.biases:
            attention += h
        if "mlp" in self.biases:
            expert += (2 * f if self.gated else f) + h
        return Parameters(
            embedding=self.vocab * h,
            positions=(self.positions or 0) * h,
            attention=self.layers * attention,
            mlp=self.layers * self.experts * expert,
            router=self.layers * router,
            norms=(2 * self.layers + 1) * (2 * h if self.norm == "layer" else h),
            head=0 if self.tied else self.vocab * h,
        )

    @cached_property
    def n_params(self):
        """Number of parameters, exactly; a tied head counts once. Memory holds all of them."""
        return self.parameters.total

    @property
    def n_active_params(self):
        """Parameters that one token uses: all but those of the experts that it does not visit.

        >>> model("mixtral-8x7b").n_params, model("mixtral-8x7b").n_active_params
        (46702792704, 12879925248)
        """
        one = self.parameters.mlp // self.experts
        return self.n_params - (self.experts - self.active_experts) * one

    @property
    def layer_params(self):
        """Parameters of one layer, with all its experts and both its norms."""
        items = self.parameters
        norms = 2 * items.norms // (2 * self.layers + 1)
        return (items.attention + items.mlp + items.router) // self.layers + norms

    @cached_property
    def layer_shape(self):
        """The sizes on which a layer's activations depend: (h, a, k, d, f, gated, E, active)."""
        return (
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_size,
            self.ffn,
            self.gated,
            self.experts,
            self.active_experts,
        )

    @cached_property
    def layer_parts(self):
        """`layer_params` by part; with one expert the MLP belongs to `cut` and `whole`.

        >>> model("gpt2").layer_parts
        LayerParts(cut=7083264, whole=4608, expert_cut=0, expert_whole=0)
        """
        h, biases = self.hidden, self.biases
        attention, cut, router = self._matrices
        if "qkv" in biases:
            attention += (self.heads + 2 * self.kv_heads) * self.head_size
        after_sum = h if "attention_output" in biases else 0
        if "mlp" in biases:
            cut += 2 * self.ffn if self.gated else self.ffn
        whole = h if "mlp" in biases else 0
        norms = 4 * h if self.norm == "layer" else 2 * h
        if self.experts == 1:
            return LayerParts(attention + cut, after_sum + whole + norms, 0, 0)
        experts = self.experts
        return LayerParts(attention, after_sum + norms + router, experts * cut, experts * whole)

    def flops_per_token(self, sequence, *, causal=False):
        """Return a token's FLOP by kind, averaged over its sequence; only matrix products count.

        Forward: 2 per active weight of a layer, 4 s a d L for the scores, 2 V h for the head; with
        GPT's kind 24 L h^2 (1 + s / 6h + V / 12Lh), Narayanan et al. (arXiv 2104.04473), eq. 3 less
        its recomputation. Training by Kaplan et al. (arXiv 2001.08361, 2.1): 6 N, without scores.

        sequence: s, at most `positions` where they are learned.
        causal: False, as in Narayanan's formula, counts all s keys for every token, though the mask
            hides about half; True counts the (s + 1) / 2 that a token sees on average.

        >>> flops = model("gpt2").flops_per_token(1024)
        >>> flops.scores, flops.forward, flops.training
        (37748736, 284812800, 854438400)
        """
        longest = self.positions or MAX_SIZE
        why = "no position was learned for a later token" if self.positions else ""
        s = require_int("sequence", sequence, minimum=1, maximum=longest, why=why)
        attention, expert, router = self._matrices
        keys_twice = s + 1 if require_bool("causal", causal) else 2 * s
        return TokenFlops(
            attention=2 * self.layers * attention,
            scores=2 * self.layers * self.heads * self.head_size * keys_twice,
            mlp=2 * self.layers * self.active_experts * expert,
            router=2 * self.layers * router,
            head=2 * self.vocab * self.hidden,
        )

    @property
    def _matrices(self):
        """Weights of a layer's matrices: of attention, of one expert and of the router."""
        h, projections = self.hidden, 2 * (self.heads + self.kv_heads)
        router = h * self.experts if self.experts > 1 else 0
        return projections * self.head_size * h, (3 if self.gated else 2) * h * self.ffn, router

    def _check_size(self, field, default=None, maximum=MAX_SIZE, why=""):
        value = getattr(self, field)
        if value is None and default is not None:
            value, maximum = default, default  # derived from checked sizes
        value = require_int(field, value, minimum=1, maximum=maximum, why=why)
        object.__setattr__(self, field, value)


def model(name):
    """Return the shape of a well-known model by name, without regard to case.

    >>> model("Qwen2.5-0.5B").n_params
    494032768

    Raises ValueError with the nearest names for an unknown one.
    """
    key = require_choice("model name", name, _sheet())
    return ModelConfig(name=key, **_sheet()[key])


def _require_places(biases):
    if not isinstance(biases, (tuple, list, set, frozenset)):
        raise TypeError(f"biases must be a tuple of {', '.join(BIAS_PLACES)}, got {biases!r}")
    chosen = {require_choice("a place in biases", place, BIAS_PLACES) for place in biases}
    return tuple(sorted(chosen, key=BIAS_PLACES.index))


@cache
def _sheet():
    import tomllib  # takes long to load in a browser, and a shape of one's own needs no sheet

    path = Path(__file__).parent / "data" / "models.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))
