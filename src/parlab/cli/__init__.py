"""The command `parlab`: the same answers in a terminal, as tables or as JSON."""
