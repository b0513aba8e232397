"""What the programs for torchrun share: the refusal without it, and the process group."""

import os
import sys
from contextlib import contextmanager

import torch.distributed as dist

from parlab.distributed import compat


def is_missing(command):
    """Return whether torchrun did not start this process, and then say which command would."""
    if "RANK" in os.environ:
        return False
    print(f"This program needs several processes. Start it with\n  {command}", file=sys.stderr)
    return True


@contextmanager
def joined_ranks(backend=None):
    """Join the ranks that torchrun started; yields the backend and this rank's device.

    backend: "gloo" or "nccl"; None takes nccl where it can be used.
    """
    backend = backend or compat.backend_for_this_machine()
    device = compat.local_device(backend)
    dist.init_process_group(backend)
    try:
        yield backend, device
    finally:
        dist.destroy_process_group()
