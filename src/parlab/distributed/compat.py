"""What differs between torch versions and devices, in one place (torch 2.11 to 2.13)."""

import sys
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


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


def bucket_cap_mb(cap_mb):
    """DDP's `bucket_cap_mb`; a cap of 0, each parameter for itself, is refused by torch 2.11."""
    return 1e-9 if cap_mb == 0 else cap_mb


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
def fake_tensors(beside_real_ones=False):
    """Inside, new tensors have a shape and a dtype but no data.

    beside_real_ones: they may meet tensors that have data in one operation.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=beside_real_ones):
        yield


class ChunksOnce(TorchFunctionMode):
    """Inside, equal pieces that `torch.chunk` cuts are one and the same: for fake tensors only.

    `fully_shard` cuts every parameter into as many pieces as there are ranks, to take one of them.
    To make that many fake tensors would take half of a run's time.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.chunk:
            return func(*args, **kwargs)
        return self._chunk(*args, **kwargs)

    def _chunk(self, tensor, n, dim=0):
        rows = tensor.shape[dim]
        most = -(-rows // n)
        sizes = [min(most, rows - start) for start in range(0, rows, most)]
        pieces = {size: tensor.narrow(dim, 0, size) for size in set(sizes)}
        return [pieces[size] for size in sizes]


def is_dtensor_type(kind):
    """Whether a class is DTensor, without the 0.7 s that loading it would cost every rank."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


@contextmanager
def propagation_inside(context):
    """Inside, DTensor works out the shapes of results within `context()`.

    torch 2.11 does it with tensors of their whole size at each call, where 2.13 remembers.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name, None)
    if original is None:
        yield
        return

    def within(*args, **kwargs):
        with context():
            return original(*args, **kwargs)

    setattr(ShardingPropagator, name, within)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, original)


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


def second_forward_hooks():
    """The (pack, unpack) hooks by which `torch.utils.checkpoint` keeps what it computes again.

    None unless its second forward, of the kind without reentrant autograd, is running.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    by = getattr(hooks[0], "__qualname__", "") if hooks else ""
    return hooks if "_recomputation_hook" in by else None


def gpu_flash_attention(q, k, v, dropout=0.0):
    """Causal attention by the operator that a GPU runs; with fake tensors a CPU can trace it.

    q: (b, heads, s, d); k and v: (b, kv_heads, s, d).
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, dropout, True)[0]


def whole_tensor(tensor):
    """A DTensor's value gathered from all ranks; a plain tensor as it is."""
    return tensor.full_tensor() if is_dtensor_type(type(tensor)) else tensor


def memory_tracker(model, optimizer, inputs):
    """torch's tracker of every tensor's bytes, by kind: a context for one training step.

    Of a model under `fully_shard` it tells sharded and gathered tensors apart.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import FSDPModule
    from torch.utils.weak import WeakIdKeyDictionary

    class WithoutModules(WeakIdKeyDictionary):
        """Hides the modules' own peaks, whose upkeep takes longer than the step itself."""

        def values(self):
            return ()

    class Tracker(FSDPMemTracker if isinstance(model, FSDPModule) else MemTracker):
        def _update_and_maybe_create_winfos(self, tensor, *args, **kwargs):
            if tensor is None:  # a gradient that another hook has freed already
                return set()
            return super()._update_and_maybe_create_winfos(tensor, *args, **kwargs)

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if self._holds_nothing_new(func, args):
                return func(*args, **kwargs or {})
            return super().__torch_dispatch__(func, types, args, kwargs)

        def _holds_nothing_new(self, func, args):
            if func is torch.ops.prim.device.default:
                return True  # every second call with fake tensors
            # gloo reduces a copy of what it reduce-scatters and cuts that. No other backend makes
            # such a copy, the fake one neither, so it is left out.
            return func is torch.ops.aten.split.Tensor and not self._knows(args[0])

        def _knows(self, tensor):
            return tensor.untyped_storage() in self._WINFO

        @classmethod
        def _should_skip_dynamo(cls):
            return False  # or torch loads its compiler at the first operator

    if isinstance(model, FSDPModule):
        tracker = Tracker(model, optimizer)
        tracker.track_inputs(inputs)
    else:
        tracker = Tracker()
        tracker.track_external(model, optimizer, *inputs)
    tracker.memory_tracking = WithoutModules()
    return tracker


def tracked_bytes(tracker, moment="current"):
    """{kind: bytes} of all tensors now ("current"), or at the "peak" since `forget_peak`."""
    (kinds,) = tracker.get_tracker_snapshot(moment).values()  # there is one device
    return {kind.value: size for kind, size in kinds.items() if kind != "Total"}


def forget_peak(tracker):
    """Let the tracker's peak begin anew with what is there now."""
    tracker._peak_mem_snap = tracker.get_tracker_snapshot()
    tracker._peak_mem = {device: kinds["Total"] for device, kinds in tracker._peak_mem_snap.items()}


def torch_context_order(sequence, n_ranks):
    """The numbers of the tokens that torch's own context parallelism deals to each rank.

    Its attention itself has no CPU kernel (torch 2.13), but the order needs none.
    """
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer

    balancer = _load_balancer._HeadTailLoadBalancer(sequence, n_ranks, torch.device("cpu"))
    order = balancer._generate_indices(restore=False).flatten()
    return [part.tolist() for part in order.chunk(n_ranks)]


def torch_pipeline_order(name, n_ranks, micro_batches, chunks=1):
    """torch's own order of a pipeline schedule: [(stage, kind, micro_batch), ...] for each rank.

    No stage is built and nothing runs: a schedule asks its stages only for these numbers.
    """
    from unittest.mock import Mock

    from torch.distributed.pipelining import schedules

    kind = schedules.get_schedule_class(name)
    stage = Mock(group_rank=0, group_size=n_ranks, num_stages=n_ranks * chunks, submod=None)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    order = kind(stage if single else [stage] * chunks, micro_batches).pipeline_order
    return [
        [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in order[rank]
            if action is not None
        ]
        for rank in range(n_ranks)
    ]


def torch_pipeline(name, modules, numbers, micro_batches, loss):
    """torch's pipeline schedule over all ranks, of which this one has some stages, and their peak.

    modules, numbers: this rank's stages and their places in the model. loss: of output and target.
    Returns the schedule and a function that says for how many forward passes these stages held
    input and output at most.
    """
    from torch.distributed.pipelining import PipelineStage, schedules

    kind = schedules.get_schedule_class(name)
    n_stages = dist.get_world_size() * len(modules)
    stages = [
        PipelineStage(module, number, n_stages, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    peak = 0

    def counted(forward, *args, **kwargs):
        nonlocal peak
        result = forward(*args, **kwargs)
        peak = max(peak, sum(len(stage.fwd_cache) for stage in stages))
        return result

    for stage in stages:
        stage.forward_one_chunk = partial(counted, stage.forward_one_chunk)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, micro_batches, loss_fn=loss)
    return schedule, lambda: peak
