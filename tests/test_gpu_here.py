"""What notebook cells ask before they measure on a card."""

import torch

from parlab.distributed.gpu.here import card_here


def test_a_cell_measures_on_a_card_or_says_in_one_line_that_there_is_none(capsys):
    card = card_here()
    said = capsys.readouterr().out
    if torch.cuda.is_available():
        assert (card, said) == ("cuda", "")
    else:
        assert card is None
        assert said == "No GPU here: this cell measures on a card where there is one.\n"
