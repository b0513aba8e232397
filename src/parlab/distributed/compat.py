"""What differs between torch versions and devices, in one place (torch 2.11 to 2.13)."""

import sys
from contextlib import contextmanager

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


# torch 2.13 deprecates the names that end in _into_tensor and _tensor; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_rows(out, tensor, group=None):
    """Fill `out` with every rank's contiguous `tensor`, one below the other along dim 0."""
    _all_gather(out, tensor, group=group)


def reduce_scatter_rows(out, tensor, group=None):
    """Sum the contiguous `tensor` over the ranks; rank r gets block r of dim 0 in `out`."""
    _reduce_scatter(out, tensor, group=group)


def in_backward():
    """Whether the autograd engine is running, as it is in a recomputed forward too."""
    return torch._C._current_graph_task_id() != -1


def group_size_of_call(func, args):
    """Ranks in the group of a dispatched collective, from the arguments of its operator."""
    if func.namespace == "c10d":
        for arg in args:
            if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
                return dist.ProcessGroup.unbox(arg).size()
    names = [argument.name for argument in func._schema.arguments]
    group = args[names.index("group_name")]
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    return group.size()


@contextmanager
def fake_process_group(n_ranks, rank=0):
    """One process stands for `n_ranks`: collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            "a process group exists already in this process: call this outside run_ranks, "
            "or dist.destroy_process_group() first"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors():
    """Inside, new tensors have a shape and a dtype but no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


def is_dtensor_type(kind):
    """Whether a class is DTensor, without the 0.7 s that loading it would cost every rank."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def local_part(tensor):
    """What this rank holds of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if is_dtensor_type(type(tensor)) else tensor


def local_tensor_mode(n_ranks):
    """A context in which one process plays `n_ranks`."""
    from torch.distributed._local_tensor import LocalTensorMode

    return LocalTensorMode(n_ranks)


def local_tensors(tensor):
    """The tensors of each rank behind a LocalTensor; None for another tensor."""
    by_rank = getattr(tensor, "_local_tensors", None)
    return by_rank and [by_rank[rank] for rank in sorted(by_rank)]
