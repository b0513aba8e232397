"""Formulas as papers print them, such as "(p-1)/(vm+p-1)", evaluated at given sizes."""

import re

from parlab.units import require_number


def value_of(formula, **sizes):
    """Return the value of a printed formula: numbers, the names in `sizes`, + - * / and brackets.

    Two factors side by side are multiplied, as on paper; the longest name that fits is taken.

    >>> value_of("(p-1)/(vm+p-1)", p=4, v=2, m=8) == 3 / 19
    True
    >>> value_of("(PP-1)(F+B-2W)", PP=8, F=1, B=2, W=1)
    7.0

    Raises ValueError for anything else in it.
    """
    names = sorted(sizes, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, names), r"\d+(?:\.\d+)?", r"[-+*/()]"])
    parts = re.findall(pattern, formula)
    # Two operators in a row would be a power or a sign.
    if "".join(parts) != formula.replace(" ", "") or re.search("[-+*/]{2}", formula):
        raise ValueError(f"formula must use {', '.join(names)} and + - * / only, got {formula!r}")
    code = ""
    for part in parts:
        factor = part not in "-+*/)"
        if factor and code and code[-1] not in "-+*/(":
            code += "*"
        # A name is replaced by its number, so nothing but arithmetic is left to evaluate.
        code += f"({require_number(part, sizes[part])!r})" if part in sizes else part
    return float(eval(code, {"__builtins__": {}}))
