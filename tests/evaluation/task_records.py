"""A few records of every task, as their published files hold them."""

from __future__ import annotations

import json

from perpend.evaluation import tasks

RECORDS = {
    "arc_easy": [
        {
            "question": "Which part of a plant takes up water?",
            "choices": {"text": ["the leaf", "the root", "the flower"], "label": ["A", "B", "C"]},
            "answerKey": "B",
        },
        {
            "question": "What do cats drink — as a rule?",
            "choices": {"text": ["milk", "stones", "Äther", "fog"], "label": ["1", "2", "3", "4"]},
            "answerKey": "1",
        },
        {
            "question": "Ice melts when it is",
            "choices": {"text": ["cold.", "warm.", "blue.", "old.", "sold."], "label": list("ABCDE")},
            "answerKey": "B",
        },
    ],
    "openbookqa": [
        {
            "question_stem": "Predators eat",
            "choices": {"text": ["lions", "humans", "bunnies", "grass"], "label": list("ABCD")},
            "answerKey": "C",
        },
        {
            "question_stem": "A fog is likely around:",
            "choices": {"text": ["a marsh", "a tundra", "the plains", "a desert"], "label": list("ABCD")},
            "answerKey": " A",
        },
    ],
    "piqa": [
        {"goal": "dresser", "sol1": "replace it with bobby pin ", "sol2": "finish with  pins ", "label": 1},
        {"goal": "How do I boil water?", "sol1": "Heat it.", "sol2": "Cool it well.", "label": 0},
        {"goal": "Make a pillow.", "sol1": "Blow into a tin can.", "sol2": "Blow into a bag.", "label": 1},
    ],
    "boolq": [
        {"passage": "Barq's -- Barq's is a drink.", "question": "is barqs a drink", "label": 1},
        {"passage": "All biomass goes through steps.", "question": "does it skip steps", "label": 0},
        {"passage": "Ö is a letter.", "question": "is ö a letter", "label": 1},
    ],
    "hellaswag": [
        {
            "activity_label": "Roof removal",
            "ctx_a": "A man is on a roof.",
            "ctx_b": "he",
            "endings": ["wraps a pair of skis.", "rips [substeps] tiles off.", "holds a  cube.", "sings."],
            "label": "3",
        },
        {
            "activity_label": "Baking",
            "ctx_a": "[header] How to bake [title] Mix the flour.",
            "ctx_b": "",
            "endings": ["Wait. [step] Then wait.", "Run.", "Add eggs.", "Sleep."],
            "label": "2",
        },
        {
            "activity_label": "Rowing",
            "ctx_a": "Two women sit in a boat.",
            "ctx_b": "they row",
            "endings": ["to the shore.", "a cake.", "upwards.", "and row."],
            "label": 0,
        },
    ],
    "winogrande": [
        {"sentence": "Sue beat Ann; _ got easy ones.", "option1": "Sue", "option2": "Ann", "answer": "2"},
        {"sentence": "A cup fell off a desk. A _ broke.", "option1": "cup", "option2": "desk", "answer": "1"},
        {"sentence": "_ paid Ann, for Eve had no coin.", "option1": "Ann", "option2": "Eve", "answer": "1"},
    ],
    "lambada_openai": [
        {"text": "He looked at the sea and saw a long grey ship"},
        {"text": "\"Only one source,\" he said,\n\"and I do not trust the source"},
        {"text": "It was cold. She closed the window and lit the lamp"},
    ],
    "gsm8k": [
        {"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "3+4=<<3+4=7>>7\n#### 7"},
        {"question": "A robe takes 2 bolts and half as many. Total?", "answer": "2+1=3\n#### 1,003"},
        {"question": "Eggs cost $2 each. Six cost?", "answer": "6*2=12\n#### 12"},
    ],
}  # fmt: skip
RECORDS["arc_challenge"] = RECORDS["arc_easy"][::-1]


def write(folder, name, split=None):
    task = tasks.task(name)
    path = folder / f"{task.files[0]}_{split or task.split}.jsonl"
    path.write_text(
        "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in RECORDS[name]), encoding="utf-8"
    )
    return path
