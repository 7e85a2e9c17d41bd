"""Between a target's tokens and those of a drafter with another tokenizer.

Drafts are drawn from the drafter's distribution restricted to the tokens both know and renormalised
(token-level intersection, Timor et al., arXiv 2502.05202). The recorded distribution is that one,
so verification stays exact, however little they share.

Shape letters: V the target's vocabulary, v the drafter's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPACE, BYTE = (
    "\u2581",
    re.compile("<0x([0-9A-F]{2})>"),
)  # SentencePiece's space, and its tokens of one byte
BYTES = {
    letter: byte for byte, letter in bytes_to_unicode().items()
}  # byte-level tokenizers write every byte so
PADDING = 512  # tokens that models of one tokenizer may differ by: they pad their vocabularies
LEAST = 0.05  # share of the target's tokens that must be known to the drafter to be worth a try


class Translation:
    """The drafter's nearest token of each of the target's, ``ids`` [V], and whether it is the same,
    ``shared`` [V].

    ``foreign`` says whether the drafter's tokenizer is another, which splits text in its own way.
    """

    def __init__(self, ids: Tensor, shared: Tensor, foreign: bool = True) -> None:
        self.ids, self.shared, self.foreign = ids, shared, foreign

    @classmethod
    def same(cls, drafter: int, target: int, padding: int | None = PADDING) -> Translation:
        """Of one tokenizer, whose vocabularies differ by ``padding`` at most (None: known to be one
        tokenizer).

        Raises ``ValueError`` when they differ more.
        """
        if padding is not None and abs(drafter - target) > padding:
            raise ValueError(
                f"drafter must share the target's vocabulary of {target} tokens, got {drafter}; "
                "give both tokenizers to translate, or another drafter"
            )
        order = torch.arange(target)
        return cls(order.clamp(max=drafter - 1), order < drafter, foreign=False)

    @classmethod
    def between(cls, target: Any, drafter: Any, vocabulary: int) -> Translation:
        """Of two tokenizers of transformers; raises ``ValueError`` when they share too few tokens
        to draft with.
        """
        known = {text: i for i, text in sorted(_texts(drafter).items(), reverse=True)}
        ids, shared = (
            torch.zeros(vocabulary, dtype=torch.int64),
            torch.zeros(vocabulary, dtype=torch.bool),
        )
        for i, text in _texts(target).items():
            if i < vocabulary and text in known:
                ids[i], shared[i] = known[text], True
            elif i < vocabulary:
                ids[i] = (
                    drafter.encode(text.decode("utf-8", "ignore"), add_special_tokens=False) or [0]
                )[-1]
        for name in ("eos_token_id", "bos_token_id"):
            ours, theirs = getattr(target, name, None), getattr(drafter, name, None)
            if ours is not None and theirs is not None and ours < vocabulary:
                ids[ours], shared[ours] = theirs, True
        found = int(shared.sum())
        if found < LEAST * vocabulary:
            raise ValueError(
                f"drafter must share at least {LEAST:.0%} of the target's {vocabulary} tokens, got {found}; "
                "use a drafter whose tokenizer splits text alike"
            )
        return cls(ids, shared)

    def ban(self, tokens: Sequence[int]) -> None:
        """Never draft ``tokens`` (picture placeholders), nor show them to the drafter when the
        target wrote one.
        """
        self.shared[list(tokens)] = False
        self.ids[list(tokens)] = 0

    def to_drafter(self, tokens: Tensor) -> Tensor:
        """The drafter's ids [...] of the target's ``tokens`` [...]."""
        return self.ids.to(tokens.device)[tokens]

    def from_drafter(self, logits: Tensor) -> Tensor:
        """Logits [..., V] over the target's tokens of the drafter's ``logits`` [..., v]."""
        shared = self.shared.to(logits.device)
        return logits[..., self.ids.to(logits.device)].masked_fill(~shared, float("-inf"))


def _texts(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of every token, which may be a part of a letter; of special ones their names."""
    vocabulary = tokenizer.get_vocab()
    spell = (
        _spelled_in_bytes if any("\u0120" in token for token in vocabulary) else _spelled_in_letters
    )
    return {i: spell(token) for token, i in vocabulary.items()}


def _spelled_in_bytes(token: str) -> bytes:
    return (
        bytes(BYTES[letter] for letter in token) if BYTES.keys() >= set(token) else token.encode()
    )


def _spelled_in_letters(token: str) -> bytes:
    found = BYTE.fullmatch(token)
    return bytes.fromhex(found[1]) if found else token.replace(SPACE, " ").encode()
