"""Which row of the data sheet a card's own name stands for."""

NAMES = {  # words that a driver's name has, all of them, and ours
    ("H200",): "h200",
    ("B200",): "b200",
    ("H100", "HBM3"): "h100-sxm",
    ("A100", "80GB"): "a100-80",
    ("A100", "40GB"): "a100-40",
    ("T4",): "t4",
}


def data_sheet_name(card):
    """Return the name in `parlab.gpu`, or None for a card without a row.

    >>> data_sheet_name("NVIDIA A100-SXM4-80GB"), data_sheet_name("Tesla T4")
    ('a100-80', 't4')
    >>> data_sheet_name("NVIDIA GeForce RTX 4090")
    """
    words = card.replace("-", " ").split()
    for needed, name in NAMES.items():
        if all(word in words for word in needed):
            return name
    return None
