"""MODEL on the command line: a name of the data sheet, or a config.json."""

import os

from parlab.config_file import read_config
from parlab.models import model

MODEL_HELP = "a name such as llama-3-8b, a config.json, or a checkpoint's folder such as ./llama"


def read_shape(text):
    """Return the ModelConfig of a name in the data sheet or of a path; a name comes first."""
    if text.endswith(".json"):
        return read_config(text)
    try:
        return model(text)
    except ValueError as error:
        if os.path.exists(text):
            return read_config(text)
        raise ValueError(f"{error} (or give the path of a config.json)") from None
