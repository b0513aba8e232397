"""Tables in plain text, for printed results that stand in columns."""


def print_table(columns, rows):
    """Print rows under their column names: quantities to the right, words to the left.

    A column holds quantities if its first entry begins with a digit or a sign.

    >>> print_table(("link", "one way"), [("nvlink-4", "450 GB/s"), ("pcie-4", "31.5 GB/s")])
    link        one way
    nvlink-4   450 GB/s
    pcie-4    31.5 GB/s

    Raises ValueError for a row that does not fill the columns.
    """
    rows = [tuple(row) for row in rows]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row must have {len(columns)} entries {tuple(columns)}, got {row}")
    lines = [tuple(columns), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    quantities = [entry[:1] in set("0123456789+-−") for entry in lines[min(1, len(rows))]]
    for line in lines:
        cells = (
            entry.rjust(width) if quantity else entry.ljust(width)
            for entry, width, quantity in zip(line, widths, quantities, strict=True)
        )
        print("  ".join(cells).rstrip())
