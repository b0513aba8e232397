"""What parlab predicts for rows that were measured on a card."""

from parlab.measurements import OURS, newest


def card_prediction(card, part, item):
    """Of a row of the newest record of a card, with the sizes of that record."""
    run = newest(card, OURS)
    (predicted,) = [row.predicted for row in run.part(part) if row.item == item]
    return predicted
