"""Eight physical numbers that turn data sheets into time, fitted to measured runs only.

Everything else in the planner is counted: FLOP, bytes, kernels, messages. `parlab.accuracy` fits
these numbers anew from the published runs and shows the errors, also of runs that the fit never
saw; a test holds the values below to that fit.
"""

from typing import NamedTuple


class Efficiencies(NamedTuple):
    """What a card and its links reach of what their data sheets say, or take besides.

    matmul_peak: share of the dense peak that a large matrix product reaches.
    matmul_tile: rows (and columns) of the tile of a result that a multiprocessor works on: an
        operand passes through shared memory once per tile of the other one. A number of elements.
    memory: share of the memory's bandwidth that element-wise kernels reach.
    nvlink, network: share of a link's bandwidth inside and between nodes that collectives reach.
    launch: seconds that a kernel takes beyond its work.
    attention: FLOP that a flash kernel does per byte of shared memory's bandwidth.
    overlap: seconds by which compute gets longer for each second of collectives beside it, which
        take multiprocessors and memory bandwidth.
    """

    matmul_peak: float
    matmul_tile: float
    memory: float
    nvlink: float
    network: float
    launch: float
    attention: float
    overlap: float


class Plausible(NamedTuple):
    """What is known about an efficiency before any run: a centre, a spread, limits and why.

    spread: of its logarithm. low, high: outside them the value would need another explanation.
    """

    centre: float
    spread: float
    low: float
    high: float
    why: str


PLAUSIBLE = Efficiencies(
    matmul_peak=Plausible(
        0.95, 0.05, 0.85, 1.0, "cuBLAS on large products, less what the tile term takes"
    ),
    matmul_tile=Plausible(128, 0.3, 64, 256, "tiles of 128 x 128 and 128 x 256 are the usual ones"),
    memory=Plausible(0.85, 0.12, 0.6, 0.95, "STREAM-like kernels reach 0.8 to 0.92"),
    nvlink=Plausible(
        0.75, 0.15, 0.5, 0.95, "bus bandwidth of 8 GPUs at large sizes, nccl-tests: 0.78 to 0.8"
    ),
    network=Plausible(0.8, 0.2, 0.5, 0.95, "InfiniBand and RoCE with GPUDirect reach 0.75 to 0.95"),
    launch=Plausible(4e-6, 0.5, 1e-6, 12e-6, "an empty kernel takes 2 to 5 microseconds"),
    attention=Plausible(
        8, 0.3, 3, 16, "FlashAttention-2 on A100, forward and backward: 150 to 190 TFLOP/s"
    ),
    overlap=Plausible(0.15, 0.6, 0.0, 0.5, "NCCL's kernels take 8 to 24 of 108 multiprocessors"),
)

FITTED = Efficiencies(
    matmul_peak=0.967,
    matmul_tile=132,
    memory=0.749,
    nvlink=0.752,
    network=0.728,
    launch=4.37e-6,
    attention=4.81,
    overlap=0.175,
)
