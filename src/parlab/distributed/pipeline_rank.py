"""One rank of a pipeline at work: its actions in order, its messages, what it holds for backward.

No order that `simulate` can time will block. A send hands its tensor over and goes on. A receive is
posted one action ahead, so that its message may arrive while the rank still computes, and is waited
for when its action is next. The number of the micro-batch is the message's tag, by which it finds
its receiver in any order: all messages of one micro-batch follow from one another. Two stages of
one rank pass their tensors without a message. (gloo knows tags. NCCL does not: there, two ranks
have to agree on one order of their messages.)

A tensor that was sent is kept until the end of the step, longer than it need be: gloo tells only by
waiting that a message is over.
"""

import time
from collections import Counter
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from parlab.distributed import stages

ALONG = {"F": 1, "B": -1, "I": -1, "W": 0}  # where an action's output goes, from stage to stage


class Rank:
    """One rank at work: its stages, what arrives for them, and what it holds for backward.

    tokens, losses: one for each micro-batch. boundary: a tensor such as stages pass on. A hop is
    (from stage, to stage), and names a message together with a micro-batch.
    """

    def __init__(self, schedule, parts, tokens, losses, boundary, pace):
        self.schedule, self.parts, self.pace = schedule, parts, pace
        self.tokens, self.losses, self.boundary = tokens, losses, boundary
        self.number = dist.get_rank()
        self.arriving, self.sending = {}, []
        self.held, self.halved = {}, {}
        self.kept = KeptBytes(weight for part in parts for weight in part.parameters())
        self.loss, self.peak, self.sent, self.starts, self.ends = None, 0, {}, [], []

    def run(self):
        """Run the rank's list of actions; what they leave is in the fields above."""
        with self.kept:
            self._run()

    def _run(self):
        row = self.schedule.actions[self.number]
        dist.barrier()
        self._expect(row[0])
        for action, following in zip_longest(row, row[1:]):
            if following is not None:
                self._expect(following)
            arrived = self._wait_for(action)
            start = time.monotonic()
            result = self._compute(action, arrived)
            if self.pace is not None:
                left = start + self._paced_seconds(action) - time.monotonic()
                time.sleep(max(left, 0))
            self.starts.append(start)
            self.ends.append(time.monotonic())
            self._pass_on(action, result)
        for work, _ in self.sending:
            work.wait()

    def _compute(self, action, arrived):
        kind, key = action.kind, action[1:]
        if kind == "F":
            return self._forward(*key, arrived)
        if kind == "B":
            return stages.backward(self.held.pop(key), arrived)
        if kind == "I":
            gradient, self.halved[key] = stages.input_gradient(self.held[key], arrived)
            return gradient
        return stages.weight_gradient(self.held.pop(key), self.halved.pop(key))

    def _forward(self, i, chunk, x):
        part = self.parts[chunk]
        loss = self.losses[i] if part.last else None
        output, self.held[i, chunk] = stages.forward(part, x, loss)
        self.peak = max(self.peak, len(self.held))
        if part.last:
            self.loss = (self.loss or 0) + output.item()
        return output

    def _wait_for(self, action):
        """The tensor that an action works on; None for the gradient of the loss and for W."""
        hop = self._hop(action, before=True)
        if hop is None:
            return self.tokens[action.micro_batch] if action.kind == "F" else None
        tensor, work = self.arriving.pop((hop, action.micro_batch))
        if work is not None:
            work.wait()
        return tensor

    def _expect(self, action):
        """Post the receive of what an action works on, if another rank sends it."""
        hop = self._hop(action, before=True)
        if hop is None or self.schedule.ranks[hop[0]] == self.number:
            return
        buffer, i = torch.empty_like(self.boundary), action.micro_batch
        work = dist.irecv(buffer, self.schedule.ranks[hop[0]], tag=i)
        self.arriving[hop, i] = buffer, work

    def _pass_on(self, action, result):
        hop, i = self._hop(action, before=False), action.micro_batch
        if hop is None:
            return
        to = self.schedule.ranks[hop[1]]
        if to == self.number:
            self.arriving[hop, i] = result, None
            return
        self.sending.append((dist.isend(result, to, tag=i), result))
        self.sent.setdefault(hop, []).append(result.nbytes)

    def _hop(self, action, before):
        """The hop by which an action's input comes or its output goes; None without one."""
        along = ALONG[action.kind]
        start = self.schedule.stage(self.number, action.chunk) - along * before
        hop = start, start + along
        return hop if along and min(hop) >= 0 and max(hop) < len(self.schedule.ranks) else None

    def _paced_seconds(self, action):
        return self.pace.times[action.kind][self.schedule.stage(self.number, action.chunk)]


class KeptBytes(saved_tensors_hooks):
    """Bytes of the storages that autograd keeps, each once: `now`, and at most so far, `peak`.

    left_out: tensors that are there anyway, such as parameters.
    """

    def __init__(self, left_out=()):
        super().__init__(self._pack, lambda box: box.tensor)
        self._left_out = {tensor.untyped_storage().data_ptr() for tensor in left_out}
        self._boxes = Counter()  # by the address of the storage
        self.now = self.peak = 0

    def _pack(self, tensor):
        # Detached, as a function that keeps its own output would otherwise keep itself alive.
        return _Box(self, tensor.detach())

    def add(self, storage, boxes):
        """One box more or less holds a storage."""
        address = storage.data_ptr()
        if address in self._left_out:
            return
        before = self._boxes[address]
        self._boxes[address] += boxes
        if 0 in (before, before + boxes):
            self.now += boxes * storage.nbytes()
            self.peak = max(self.peak, self.now)


class _Box:
    """What autograd holds in place of a tensor, until it needs it no more."""

    def __init__(self, kept, tensor):
        self.kept, self.tensor = kept, tensor
        kept.add(tensor.untyped_storage(), 1)

    def __del__(self):
        self.kept.add(self.tensor.untyped_storage(), -1)
