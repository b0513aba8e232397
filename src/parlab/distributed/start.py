"""How the processes of `run_ranks` come to be: what is sent to them and by which start method."""

import multiprocessing
import pickle
import sys
import threading
import types
from contextlib import contextmanager

from parlab.units import require_choice


def pickle_program(fn, args):
    """Pickle by value, so that a function typed into a cell reaches processes without the cell."""
    try:
        import cloudpickle
    except ImportError:
        if getattr(fn, "__module__", None) == "__main__":
            raise ImportError(
                f"fn {getattr(fn, '__name__', fn)!r} is defined in a notebook or script; to send "
                "it to other processes, pip install cloudpickle, or import it from a module"
            ) from None
        cloudpickle = pickle
    try:
        return cloudpickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(
            f"fn and args must be picklable to reach the ranks, but: {error}; create locks, "
            "files, generators and process groups inside fn"
        ) from error


def context(start_method):
    """The multiprocessing context for a start method, by default the fastest that is safe."""
    # A plain fork is not offered: it deadlocks once the caller has used OpenMP.
    available = multiprocessing.get_all_start_methods()
    methods = [method for method in ("forkserver", "spawn") if method in available]
    start_method = require_choice("start_method", start_method or methods[0], methods)
    chosen = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        # Optimizers and DDP load torch._dynamo: once here, not for seconds in every rank.
        modules = ["torch.distributed", "torch._dynamo", "parlab.distributed.rank"]
        chosen.set_forkserver_preload(modules)
    return chosen


_hiding_main = threading.Lock()


@contextmanager
def main_module_hidden():
    """Keep multiprocessing from importing the caller's script again in every process.

    The ranks get fn by value and need nothing from the script, which may lack a main guard.
    """
    with _hiding_main:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
