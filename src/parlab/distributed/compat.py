"""What differs between torch versions and devices, in one place (torch 2.11 to 2.13)."""

import torch
import torch.distributed as dist


def backend_for_this_machine():
    """nccl where a CUDA build sees a card, gloo otherwise."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def local_device(backend):
    """The card that torchrun's LOCAL_RANK selects under nccl, else the CPU."""
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
    torch.cuda.set_device(device)
    return device


def synchronise(device):
    """Wait for queued kernels; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def messages_must_be_grouped(tensor, group):
    """nccl runs messages in the order of one stream: unless grouped, two sends block each other."""
    return dist.get_backend(group) != "gloo" or tensor.device.type != "cpu"
