"""Answers that are spelled by a grammar: those of transformers' generate with the same, whatever
drafts, in batches, streams and by questions; one sentence for what is none.
"""

import itertools
import json
from collections import Counter

import pytest
import torch
import xgrammar

import specmm
from specmm import structured
from specmm.core.drafter import Feedback
from specmm.core.tree import DraftTree, TreeShape
from specmm.core.watching import watched
from specmm.structured import GrammarProcessor, Matchers, SpelledDrafts, Spelling
from specmm.verify import Recursive
from specmm.verify.exhaustive import Draws, emitted_probs, sequence_probs, total_variation
from tests.commands import refused, succeed
from tests.noisy import noisy
from tests.tiny.saying import saying

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
}
SPELLED = structured.json_schema(SCHEMA)
METHODS = ["ar", "prompt-lookup", "suffix", "recycle", "block", "deer", "text-draft", "diffuspec"]
PROMPTS = ["def f():\n    return ", "x = ", "import os\n\nNAME = "]
LENGTH = 48


@pytest.fixture(scope="module")
def coder():
    return specmm.TextPipeline.from_pretrained("pocket/coder", torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def wanted(coder):
    """By transformers' generate and xgrammar's own class."""
    coder.tokenizer.padding_side = "left"
    inputs = coder.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    width = inputs["input_ids"].shape[1]
    own = xgrammar.contrib.hf.LogitsProcessor(compiled(coder))
    found = coder.model.generate(
        **inputs, max_new_tokens=LENGTH, do_sample=False, logits_processor=[own]
    )
    return found[:, width:].tolist()


def compiled(pipe):
    return SPELLED.compiled(pipe.tokenizer, pipe.model.config.vocab_size, pipe.ends())


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_of_generate(coder, wanted, method):
    out = coder(PROMPTS, method=method, max_new_tokens=LENGTH, grammar=SPELLED)
    found = [ids.tolist() for ids in out.tokens]
    assert found == [row[: len(ids)] for row, ids in zip(wanted, found, strict=True)]
    assert all(len(ids) == LENGTH or ids[-1] in coder.ends() for ids in found)
    assert "grammar JSON schema" in str(out.certificate) and out.certificate.kind == "exact"
    for text in out.texts:
        json.loads(text) if len(text) < LENGTH else None


@pytest.mark.parametrize("method", ["block", "prompt-lookup"])
def test_rows_that_begin_later_and_streams(coder, method):
    options = dict(method=method, max_new_tokens=24, grammar=SPELLED)
    whole = coder(PROMPTS, **options).texts
    assert coder(PROMPTS, batch_size=2, **options).texts == whole
    parts = list(coder.stream(PROMPTS, **options))
    assert ["".join(row) for row in zip(*parts, strict=True)] == whole


def test_settings_of_generate_go_with_it(coder):
    """And xgrammar's own class, given where generate takes it."""
    options = dict(max_new_tokens=24, no_repeat_ngram_size=6)
    own = xgrammar.contrib.hf.LogitsProcessor(compiled(coder))
    given = coder(PROMPTS[0], method="block", logits_processor=[own], **options)
    assert coder(PROMPTS[0], grammar=SCHEMA, **options).texts == given.texts


@pytest.mark.parametrize("method", ["ar", "msd", "prompt-lookup"])
def test_answers_about_pictures(method):
    pipe = specmm.VQAPipeline.from_pretrained("pocket/llava", torch_dtype=torch.float32)
    spelled = structured.regex("I see (one|two) (red|pink|green) [a-z]{3,6}")
    out = pipe(noisy((96, 96), 1), "What is it?", method=method, grammar=spelled)
    words = out.answers[0].split()
    assert words[:2] == ["I", "see"] and words[2] in ("one", "two") and len(words) == 5


def test_what_is_sampled_has_the_law_of_plain_decoding():
    """All texts of a small grammar, drawn 4,000 times."""
    model, words = saying("abcd")
    model.lm_head.weight.data.mul_(0.2)
    pipe = specmm.TextPipeline(model, words)
    spelled = structured.grammar('root ::= ("a" | "b") ("c" | "d") ("a" | "d")')
    options = dict(max_new_tokens=4, temperature=1.0, grammar=spelled)
    prompts = ["a c a b d a"] * 4000
    counts = [
        Counter(pipe(prompts, method=method, seed=seed, **options).texts)
        for seed, method in enumerate(("ar", "prompt-lookup"))
    ]
    assert set(counts[0]) == set(counts[1]) and len(counts[0]) == 8
    off = sum((counts[0][x] - counts[1][x]) ** 2 / (counts[0][x] + counts[1][x]) for x in counts[0])
    assert off < 24.3, "chi-square of 7 degrees, one in a thousand"


def test_what_must_come_is_drafted(coder):
    """On one line, where a name is given all its letters are."""
    rounds = []
    line = structured.json_schema(SCHEMA, any_whitespace=False)
    with watched(rounds.append):
        texts = coder(PROMPTS, method="prompt-lookup", max_new_tokens=64, grammar=line).texts
    assert texts == [json.dumps(json.loads(text)) for text in texts]
    assert sum(int(r.result.kept.sum()) for r in rounds) > 1.8 * len(rounds) * len(PROMPTS)
    spelling = Spelling.of(
        Matchers([line.compiled(coder.tokenizer, coder.model.config.vocab_size, coder.ends())]),
        coder.tokenizer,
    )
    encode = lambda text: coder.tokenizer(text)["input_ids"]  # noqa: E731
    assert coder.tokenizer.decode([spelling.forced(0, encode('{"name": "x", "'))]) == "n"
    assert spelling.forced(0, encode('{"name": "')) is None


class Drafted:
    """A chain of two given drafts, of given distributions."""

    max_nodes, max_depth = 3, 2

    def __init__(self, drafts, probs):
        self.tree = DraftTree(torch.tensor([drafts]), TreeShape.chain(2), probs)

    def propose(self, feedback, uniforms):
        return self.tree


@pytest.mark.parametrize("broken", [False, True])
def test_spelled_drafts_keep_the_distribution(broken):
    """Every pair of drafts, enumerated: one that must come, one that ends the chain; the twin
    records what the drafter drew from.
    """
    model, words = saying("abcd")
    spelled = structured.grammar('root ::= ("a" | "b") ("c" | "d") "a" ("b" | "d")')
    size = model.config.vocab_size
    matchers = Matchers([spelled.compiled(words, size, [2])])
    torch.manual_seed(0)
    q = torch.rand(3, size, dtype=torch.float64).softmax(-1)
    root = words.encode("a")[0]

    def after(prefix):
        probs = (3 * torch.rand(size, dtype=torch.float64)).softmax(-1)
        mask = matchers.mask(0, [root, *prefix])
        probs = probs if mask is None else probs.masked_fill(mask.others(probs), 0)
        return probs / probs.sum()

    tables = [
        torch.stack([after(prefix) for prefix in itertools.product(range(size), repeat=n)])
        for n in range(3)
    ]
    feedback = Feedback(None, torch.tensor([root]))
    law = torch.zeros(size**3, dtype=torch.float64)
    lengths = set()
    for drafts in itertools.product(range(size), repeat=2):
        inner = Drafted([root, *drafts], q[None])
        spelling = Spelling.of(matchers, words)
        tree = SpelledDrafts(inner, spelling, lambda row: []).propose(feedback, None)
        lengths.add(depth := tree.shape.depth)
        if broken:
            tree.probs = q[None, : depth + 1]
        first, second = [*tree.tokens[0, 1:].tolist(), 0, 0][:2]
        prefix = torch.tensor([[0, first, first * size + second][: depth + 1]])
        chance = q[1, drafts[0]] * q[2, drafts[1]]
        found = emitted_probs(Recursive(), Draws(tree, chance[None], prefix), tables)
        for table in tables[depth + 1 :]:
            found = (found[:, None] * table).flatten()
        law += found
    assert lengths == {0, 2}, "a draft that may not come ends it, one that must takes its place"
    off = total_variation(law, sequence_probs(tables, 3))
    assert off > 1e-3 if broken else off < 1e-12


def test_matchers_go_back(coder):
    matchers = Matchers([compiled(coder)])
    encode = lambda text: coder.tokenizer(text)["input_ids"]  # noqa: E731
    own = lambda answer, row=0: matchers._mask(row, encode(answer)).words  # noqa: E731
    begin = own("")
    assert (own('{"name": "ab') != 0).any() and not torch.equal(own('{"name": "ab'), begin)
    assert matchers.mask(0, encode("[")) is None, "which may not come"
    assert torch.equal(own(""), begin) and torch.equal(own("", row=1), begin)
    whole = encode('{"name": "ab", "n": 7, "tags": []}')
    assert all(end in matchers.mask(0, whole) for end in coder.ends())
    assert matchers.mask(0, [*whole, *coder.ends()]) is None, "an answer that has ended"


def test_a_processor_for_generate_itself(coder, wanted):
    ids = coder.tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    for options in ({}, dict(custom_generate=specmm.custom_generate(method="prompt-lookup"))):
        processor = GrammarProcessor(compiled(coder))
        found = coder.model.generate(
            ids, max_new_tokens=12, do_sample=False, logits_processor=[processor], **options
        )
        assert found[0, ids.shape[1] :].tolist() == wanted[0][:12]


MISTAKES = {
    "{nope": (structured.json_schema, "json_schema must be JSON, got '{nope'"),
    "[1]": (structured.json_schema, "json_schema must be a JSON object, got list"),
    '{"type": "nothing"}': (structured.json_schema, "json_schema cannot be used, got: Unsupported"),
    "[a-z": (structured.regex, "regex cannot be used, got: Regex parsing error"),
    'root ::= "a': (structured.grammar, "grammar cannot be used, got: EBNF"),
    'start ::= "a"': (structured.grammar, "grammar cannot be used, got: "),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_what_is_no_grammar_is_one_sentence(coder, text):
    make, sentence = MISTAKES[text]
    with pytest.raises(ValueError) as caught:
        coder("x", grammar=make(text), max_new_tokens=4)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(grammar="[a-z]"), "grammar must be of specmm.structured or a dict, got str"),
        (dict(grammar=SCHEMA, compiled=True), "compiled=True takes temperature, .*, got grammar"),
        (dict(min_p=0.1, compiled=True), "compiled=True takes temperature, .*, got min_p"),
        (dict(min_p=0.1, batch_size=1), "batch_size must be 0 with min_p"),
    ],
)
def test_what_does_not_go_together(coder, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        coder(["x", "y"], max_new_tokens=4, **options)


def test_a_grammar_that_cannot_be_spelled():
    model, words = saying("abcd")
    pipe = specmm.TextPipeline(model, words)
    with pytest.raises(ValueError, match="grammar must allow text that the tokenizer can spell"):
        pipe("a", grammar=structured.regex("a[x-z]"), max_new_tokens=4)


def test_the_commands(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "integer", "minimum": 10, "maximum": 99}))
    words = ["complete", "pocket/coder", "-p", "x = ", "--max-new-tokens", "8"]
    said = succeed(*words, "--json-schema", schema, "--method", "prompt-lookup")
    assert 10 <= int(said.stdout) <= 99
    assert succeed(*words, "--regex", "ab|cd").stdout.strip() in ("ab", "cd")
    assert "give only one of --regex, --grammar" in refused(
        *words, "--regex", "a", "--grammar", "b"
    )
