"""The three named losses, against the harness and against plain sums."""

from __future__ import annotations

import json
import math

import pytest
import torch

from perpend.errors import InputError
from perpend.evaluation import corpus

ARTICLES = [
    " = Robert Boulter = \n \n Robert Boulter is an English film , television and theatre actor . He had a "
    'guest @-@ starring role in 2 @,@ 000 , as " Craig " in the ( long ) episode " Teddy \'s Story " . \n',
    " = Du Fu = \n \n = = Life = = \n \n Du Fu ( 712 – 770 ) was a poet ; his mother 's name : N . \n"
    + " He wrote of rain and of the river , and of N others . \n" * 6,
]
TEXT = " \n" + "".join(ARTICLES)


def test_articles_are_found():
    assert corpus.pages(TEXT) == ARTICLES
    assert corpus.pages("plain prose\n = = not a title = = \n") == ["plain prose\n = = not a title = = \n"]


@pytest.mark.parametrize("article", [*ARTICLES, "a 's 'b c' { d } [ e ] ° \n x", "", "' 1' /' 2/"])
def test_detokenizing_equals_the_harness_own(article):
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    assert corpus.detokenize(article) == theirs.wikitext_detokenizer({"page": article})


@pytest.mark.parametrize("context", [16, 2048])
def test_word_perplexity_equals_the_harness_own(context, model, tokenizer, tmp_path):
    """The published `wikitext` task on our articles, rolling windows and all."""
    pytest.importorskip("lm_eval")
    import lm_eval.tasks
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    data = tmp_path / "pages.jsonl"
    data.write_text("\n".join(json.dumps({"page": one}) for one in ARTICLES))
    (tmp_path / "own.yaml").write_text(
        f"include: {lm_eval.tasks.__path__[0]}/wikitext/wikitext.yaml\ntask: own_wikitext\n"
        f"dataset_path: json\ndataset_name: null\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        "training_split: null\nvalidation_split: null\ntest_split: test\nshould_decontaminate: false\n"
    )
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=context, device="cpu")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    output = simple_evaluate(lm, tasks=["own_wikitext"], task_manager=manager, bootstrap_iters=0)
    theirs = output["results"]["own_wikitext"]["word_perplexity,none"]
    mine = corpus.word_perplexity(model, tokenizer, ARTICLES, context=context)
    assert math.log(mine.perplexity) == pytest.approx(math.log(theirs), rel=1e-5)
    assert mine.results["context"] == context
    assert mine.results["unit"] == "word"


def test_fixed_loss_is_the_mean_over_disjoint_windows(model, tokenizer):
    text = "The rain in the plain falls mainly. " * 40
    result = corpus.fixed_loss(model, tokenizer, [text], length=32, sequences=5)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][: 5 * 32]).view(5, 32)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert result.loss == pytest.approx(float(want), abs=1e-4)
    assert (result.tokens, result.context, result.stride, result.bos) == (5 * 31, 32, 32, False)
    assert result.low < result.loss < result.high


def test_a_stride_scores_the_same_tokens_with_more_context(model, tokenizer):
    text = "The rain in the plain falls mainly on those who wait. " * 12
    plain = corpus.token_perplexity(model, tokenizer, [text], context=24)
    strided = corpus.token_perplexity(model, tokenizer, [text], context=24, stride=6)
    total = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert strided.tokens == total - 1
    assert plain.tokens == total - math.ceil(total / 24)
    assert strided.loss != pytest.approx(plain.loss, abs=1e-6)
    with_bos = corpus.token_perplexity(model, tokenizer, [text], context=24, bos="always")
    assert with_bos.tokens == total
    assert with_bos.results["bos"] is True


def test_more_than_there_is_is_refused(model, tokenizer):
    with pytest.raises(InputError, match="holds 2"):
        corpus.word_perplexity(model, tokenizer, ARTICLES, documents=3)
    with pytest.raises(InputError, match="sequences"):
        corpus.fixed_loss(model, tokenizer, ["short text " * 20], length=16, sequences=500)
