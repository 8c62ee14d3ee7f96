"""Questions among passages: the ones that hold the answer, hidden among passages of other questions."""

from __future__ import annotations

import random

from perpend.evaluation.ruler._kinds import Build, RulerTask, Sample, Sources

ASK = (
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words."
)
TEMPLATE = (
    f"{ASK}\n\nThe following are given documents.\n\n{{context}}\n\n{ASK}\n\nQuestion: {{query}} Answer:"
)


def among(name: str) -> Build:
    def build(rng: random.Random, size: int, index: int, sources: Sources) -> Sample:
        passages, questions = sources.documents[name]
        asked = questions[index % len(questions)]
        held, related = list(asked["context"]), list(asked["related"])
        wanted = max(0, min(size, len(passages)) - len(held))
        if wanted <= len(related):
            chosen = held + rng.sample(related, wanted)
        else:
            taken = {*held, *related}
            others = [one for one in range(len(passages)) if one not in taken]
            chosen = held + related + rng.sample(others, min(wanted - len(related), len(others)))
        rng.shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{passages[one]}" for i, one in enumerate(chosen, 1))
        outputs = tuple(asked["outputs"])
        return Sample(TEMPLATE.format(context=context, query=asked["query"]), outputs, " " + outputs[0])

    return build


TASKS = tuple(
    RulerTask(
        task,
        among(name),
        steps=32,
        match="part",
        needs=(name,),
        most=lambda sources, name=name: len(sources.documents[name][0]),
    )
    for task, name in (("qa_1", "squad"), ("qa_2", "hotpotqa"))
)
