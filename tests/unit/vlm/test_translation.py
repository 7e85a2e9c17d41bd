"""Between two tokenizers: what is shared, what is never drafted, what is refused."""

import pytest
import torch

from specmm.hf.drafters.translation import Translation


class Words:
    """A tokenizer of whole words, the first of which is the end token."""

    bos_token_id = None
    eos_token_id = 0

    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}

    def encode(self, text, add_special_tokens):
        return [
            i
            for i, word in enumerate(self.words)
            if text.strip().startswith(word.strip("\u0120\u2581"))
        ]


def test_shared_tokens_keep_their_logits_and_others_are_never_drafted():
    target = Words("<e>", "\u0120a", "\u0120bc", "dog")
    drafter = Words("</s>", "dog", "\u2581a", "\u2581b", "x")
    between = Translation.between(target, drafter, 5, 99)
    between.ban([3])
    logits = torch.arange(5.0)[None, None]
    assert between.from_drafter(logits).tolist() == [
        [[0.0, 2.0, float("-inf"), float("-inf"), float("-inf")]]
    ]
    assert between.to_drafter(torch.tensor([0, 1, 2, 3])).tolist() == [0, 2, 3, 0]


def test_tokens_are_compared_as_bytes():
    """A space, a tab, a line's end, a letter of two bytes and its first byte alone, written in two
    ways.
    """
    target = Words("<e>", "\u0120", "\u0109", "\u010a", "\u00c3\u00a9", "\u00c3", "\u0120x")
    drafter = Words("</s>", "<0xC3>", "\u00e9", "<0x0A>", "<0x09>", "\u2581")
    between = Translation.between(target, drafter, 7, 99)
    assert between.shared.tolist() == [True] * 6 + [False]
    assert between.ids[:6].tolist() == [0, 5, 4, 3, 2, 1]


def test_too_little_in_common_is_refused():
    said = "drafter must share at least 5% of the target's 40 tokens, got 1"
    with pytest.raises(ValueError, match=said):
        Translation.between(Words("<e>", "a", "b"), Words("</s>", "c"), 40, 99)


def test_padded_vocabularies_are_the_same():
    wider, narrower = Translation.same(6, 4), Translation.same(4, 6)
    assert wider.from_drafter(torch.arange(6.0)).tolist() == [0, 1, 2, 3]
    found = narrower.from_drafter(torch.arange(4.0)).tolist()
    assert found == [0, 1, 2, 3, float("-inf"), float("-inf")]
    said = "must share the target's vocabulary of 40 tokens, got 4000"
    with pytest.raises(ValueError, match=said):
        Translation.same(4000, 40)


def test_one_tokenizer_may_be_padded_at_will():
    """The caller who knows both tokenizers to be equal sets no limit."""
    wider = Translation.same(4000, 40, padding=None)
    narrower = Translation.same(40, 4000, padding=None)
    assert bool(wider.shared.all()) and int(narrower.shared.sum()) == 40
    assert int(narrower.ids.max()) == 39
    assert not wider.foreign and not narrower.foreign
