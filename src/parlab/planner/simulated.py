"""An iteration with its pipeline simulated: for finalists, and where stages differ."""

from parlab.memory.rank import rank_params
from parlab.pipeline.schedules import interleaved_1f1b, one_f_one_b
from parlab.pipeline.timeline import simulate
from parlab.pipeline.zero_bubble import zero_bubble_h1
from parlab.planner.step import block, pipeline_seconds


def simulated_seconds(job, layout, step):
    """Return seconds of an iteration; step: its StepTime, of which the pipeline's part is replaced.

    The head is on the last stage, a third of it in forward. A transfer is a message's latency and
    bytes over bandwidth.
    """
    a = layout
    if a.pp == 1:
        return sum(step)
    made = block(job, a.tp, a.cp, a.ep, a.micro_batch, a.recompute, a.sequence_parallel)
    part = rank_params(job.config, a.tp, a.pp, a.pp - 1, a.ep)
    m = job.global_batch // (a.dp * a.micro_batch)
    transfers, _ = pipeline_seconds(
        job, made, part.layers, a.pp, a.tp * a.cp * a.dp, m, a.chunks, a.schedule
    )
    transfer = transfers / m / 2 / a.chunks
    layers, stages = part.layers / a.chunks, a.pp * a.chunks

    def of_stages(seconds):
        each = [layers * seconds] * stages
        each[-1] += made.head / 3
        return each

    forward, linear = of_stages(made.forward), made.layer.linear
    if a.schedule == "ZB-H1":
        timeline = simulate(
            zero_bubble_h1(a.pp, m),
            forward,
            input_gradient=of_stages(made.backward - linear),
            weight_gradient=of_stages(linear),
            transfer=transfer,
        )
    else:
        schedule = one_f_one_b(a.pp, m) if a.chunks == 1 else interleaved_1f1b(a.pp, m, a.chunks)
        backward = [layers * made.backward] * stages
        backward[-1] += 2 * made.head / 3
        timeline = simulate(schedule, forward, backward, transfer=transfer)
    outside = step.data_parallel + step.slower_beside_collectives + step.optimizer
    return timeline.makespan + outside
