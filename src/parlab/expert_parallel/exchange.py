"""All-to-all between simulated ranks: every rank has a parcel for every rank, of any size."""

import numpy as np


def all_to_all(parcels):
    """Deliver parcels[src][dst]; return (received, sent) with received[dst][src].

    A rank's parcel for itself stays where it is and counts nothing. With N equal parcels of S bytes
    in all, a rank sends (N-1)/N S.

    parcels: N lists of N arrays; their shapes may differ, and an array may be empty.
    Raises ValueError unless every rank has one parcel for each.

    >>> received, sent = all_to_all([[np.zeros(1), np.arange(2.0)], [np.ones(3), np.zeros(1)]])
    >>> received[1][0].tolist(), sent
    ([0.0, 1.0], [16, 24])
    """
    parcels = [[np.asarray(parcel) for parcel in row] for row in parcels]
    n = len(parcels)
    if not n or any(len(row) != n for row in parcels):
        raise ValueError(f"parcels must be N lists of N arrays, got {list(map(len, parcels))}")
    sent = [
        sum(parcel.nbytes for dst, parcel in enumerate(row) if dst != src)
        for src, row in enumerate(parcels)
    ]
    return [[parcels[src][dst].copy() for src in range(n)] for dst in range(n)], sent
