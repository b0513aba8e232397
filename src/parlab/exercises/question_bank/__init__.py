"""The "Check yourself" questions, chapter by chapter."""

from parlab.exercises.question_bank import (
    activations,
    collectives,
    context_parallel,
    data_parallel,
    experts,
    fsdp_on_a_gpu,
    layouts,
    one_gpu,
    pipelines,
    tensor_parallel,
    zero,
)

_CHAPTERS = (
    collectives,
    data_parallel,
    tensor_parallel,
    zero,
    activations,
    pipelines,
    context_parallel,
    experts,
    layouts,
    one_gpu,
    fsdp_on_a_gpu,
)

QUESTIONS = {
    f"{question.chapter}.{number}": question
    for chapter in _CHAPTERS
    for number, question in enumerate(chapter.QUESTIONS, 1)
}
