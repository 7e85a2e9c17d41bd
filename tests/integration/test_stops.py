"""Texts that end an answer: in special tokens, across them, behind a prompt's blank; streams."""

import pytest

import specmm
from specmm.hf.prompts.stop_strings import StopStrings
from tests.tiny.saying import LLAMA, saying

END = "<|im_end|>"
LETTERS = [*"abcdef", END, *"ghijklmnopqrstuvwxyz"]
FRANCE = ["▁The", "▁capital", "▁of", "▁France", "▁is", "▁Paris", "."]
METHODS = ["ar", "prompt-lookup"]


@pytest.fixture(scope="module")
def letters():
    return specmm.TextPipeline(*saying(LETTERS, specials=[END]))


@pytest.fixture(scope="module")
def france():
    return specmm.TextPipeline(*saying(FRANCE, decoder=LLAMA))


def both(pipe, prompt, **options):
    """A text, which its stream must join to."""
    out = pipe(prompt, **options)
    parts = pipe.stream(prompt, **options)
    assert "".join(part[0] for part in parts) == out.texts[0]
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "stop, text, count",
    [
        (END, "bcdef", 6),
        ("im_en", "bcdef", 6),
        ("f" + END, "bcde", 6),
        (END + "g", "bcdef", 7),
        ("fg", "bcdefghijk", 11),  # which readers see, but the model did not say
        (["zz", "h"], "bcdefg", 8),
    ],
)
def test_special_tokens_are_looked_through(letters, method, stop, text, count):
    out = both(letters, "a", max_new_tokens=11, stop=stop, method=method)
    assert (out.texts[0], len(out.tokens[0])) == (text, count)


@pytest.mark.parametrize("method", METHODS)
def test_stops_are_those_of_generate(letters, method):
    model, words = letters.model, letters.tokenizer
    inputs = dict(input_ids=words("a", return_tensors="pt")["input_ids"], max_new_tokens=11)
    own = model.generate(**inputs, do_sample=False, stop_strings=[END], tokenizer=words)
    fn = specmm.custom_generate(method=method, tokenizer=words, stop=END)
    ours = model.generate(**inputs, do_sample=False, custom_generate=fn)
    out = letters("a", max_new_tokens=11, stop=END, method=method)
    assert own[0, 1:].tolist() == ours[0, 1:].tolist() == out.tokens[0].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_the_blank_between_prompt_and_text_stays(france, method):
    prompt = "▁The ▁capital ▁of"
    out = both(france, prompt, max_new_tokens=4, method=method)
    assert out.texts == [" France is Paris."]
    cut = both(france, prompt, max_new_tokens=4, method=method, stop=" France")
    assert (cut.texts, len(cut.tokens[0])) == ([""], 1)
    cut = both(france, prompt, max_new_tokens=4, method=method, stop="France is")
    assert cut.texts == [" "]


def test_an_answer_in_a_chat_begins_with_no_blank(france):
    france.tokenizer.chat_template = "{% for m in messages %}▁The ▁capital ▁of{% endfor %}"
    out = both(france, "whatever", max_new_tokens=2, chat=True)
    assert out.texts == ["France is"]
    cut = both(france, "whatever", max_new_tokens=4, chat=True, stop=" France")
    assert cut.texts == [""]


def test_a_stream_waits_where_texts_are_tidied():
    """Of texts that lose a blank before a full stop, once that is there."""
    tidy = lambda ids: " ".join("ab."[i] * 2 for i in ids).replace(" ..", "..")  # noqa: E731
    stops = StopStrings([], tidy, tidy, tidied=True)
    ids = [0, 1, 2, 1, 2]
    shown = [stops.sure(ids[:n]) for n in range(1, len(ids) + 1)]
    assert shown == ["", "aa", "aa", "aa bb..", "aa bb.."] and stops.cut(ids) == "aa bb.. bb.."
    assert all(stops.cut(ids).startswith(text) for text in shown)


@pytest.mark.parametrize("method", METHODS)
def test_outputs_say_why_they_end_and_what_was_read(letters, method):
    prompts = ["a", "a b c", "x y"]
    out = letters(prompts, max_new_tokens=6, method=method, stop=["k", END])
    assert out.prompt_tokens == [1, 3, 2]
    assert out.finish_reasons == ["stop", "stop", "length"]
    fewer = letters(prompts, max_new_tokens=5, method=method, stop=["k", END], batch_size=2)
    assert fewer.finish_reasons == ["length", "stop", "length"]
    assert fewer.prompt_tokens == out.prompt_tokens


@pytest.mark.parametrize("method", METHODS)
def test_custom_generate_tells_of_its_run(letters, method):
    fn = specmm.custom_generate(method=method)
    assert fn.last is None
    ids = letters.tokenizer("a b a b", return_tensors="pt")["input_ids"]
    options = dict(max_new_tokens=9, do_sample=True, top_k=4, min_p=0.1)
    letters.model.generate(ids, custom_generate=fn, **options)
    assert fn.last.method.startswith({"ar": "AR", "prompt-lookup": "PromptLookup"}[method])
    assert fn.last.stats.tokens == 9 and fn.last.certificate.kind == "exact"
    wanted = {"temperature": 1.0, "top_k": 4, "min_p": 0.1}
    assert fn.last.certificate.settings == wanted


@pytest.mark.parametrize("batch_size", [0, 2])
def test_outputs_tell_of_each_row(letters, batch_size):
    """Rounds of a row are its own: alone, in a batch, and where rows take each other's place."""
    prompts = ["abcdefghi", "a", "xyzab"]
    options = dict(method="prompt-lookup", max_new_tokens=40)
    out = letters(prompts, batch_size=batch_size, **options)
    alone = [letters(prompt, **options).stats.tau for prompt in prompts]
    assert out.taus == alone and len(set(alone)) > 1 and max(alone) > 1
    kept = sum((i + 1) * n for i, n in enumerate(out.stats.kept))
    assert out.stats.tokens == sum(map(len, out.tokens)) == 3 + kept
    plain = letters(prompts, method="ar", max_new_tokens=24)
    assert plain.taus == [1, 1, 1] and plain.stats.tau == 1
    assert plain.stats.tokens == sum(map(len, plain.tokens))
