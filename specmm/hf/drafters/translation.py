"""Maps between the tokens of a target and of a drafter with another tokenizer.

Drafts are drawn from the drafter's distribution, restricted to the tokens both have in common and
renormalised (token-level intersection, Timor et al., arXiv 2502.05202). That distribution is the
recorded one, so verification stays exact, however little the two share.

Shape letters: V the target's vocabulary, v the drafter's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPACE = "\u2581"  # SentencePiece's space
BYTE = re.compile("<0x([0-9A-F]{2})>")  # and its tokens of one byte
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # for byte-level tokenizers
PADDING = 512  # tokens that models of one tokenizer may differ by: they pad their vocabularies
LEAST = 0.05  # share of the target's tokens that the drafter must know to be worth a try


class Translation:
    """For each target token: the drafter's nearest token, ``ids`` [V], and whether both have the
    same text, ``shared`` [V].

    ``foreign`` says whether the drafter has another tokenizer, which splits text in its own way.
    """

    def __init__(self, ids: Tensor, shared: Tensor, foreign: bool = True) -> None:
        self.ids = ids
        self.shared = shared
        self.foreign = foreign

    @classmethod
    def same(cls, drafter: int, target: int, padding: int | None = PADDING) -> Translation:
        """The identity for a shared tokenizer, whose vocabularies differ by at most ``padding``
        (None: by any number).

        Raises ``ValueError`` if they differ by more.
        """
        if padding is not None and abs(drafter - target) > padding:
            raise ValueError(
                f"drafter must share the target's vocabulary of {target} tokens, got {drafter}; "
                "give both tokenizers to translate, or another drafter"
            )
        order = torch.arange(target)
        return cls(order.clamp(max=drafter - 1), order < drafter, foreign=False)

    @classmethod
    def between(
        cls,
        target: PreTrainedTokenizerBase,
        drafter: PreTrainedTokenizerBase,
        vocabulary: int,
        rows: int,
    ) -> Translation:
        """The translation from the target's tokenizer, with ``vocabulary`` tokens, to the
        drafter's, whose model has ``rows`` tokens. Raises ``ValueError`` if they share too few
        tokens.
        """
        texts = sorted(_texts(drafter).items(), reverse=True)
        id_of = {text: i for i, text in texts if i < rows}
        ids = torch.zeros(vocabulary, dtype=torch.int64)
        shared = torch.zeros(vocabulary, dtype=torch.bool)
        for i, text in _texts(target).items():
            if i < vocabulary and text in id_of:
                ids[i] = id_of[text]
                shared[i] = True
            elif i < vocabulary:
                letters = text.decode("utf-8", "ignore")
                spelled = drafter.encode(letters, add_special_tokens=False)
                ids[i] = next((token for token in reversed(spelled) if token < rows), 0)
        for name in ("eos_token_id", "bos_token_id"):
            ours = getattr(target, name, None)
            theirs = getattr(drafter, name, None)
            if ours is not None and theirs is not None and ours < vocabulary and theirs < rows:
                ids[ours] = theirs
                shared[ours] = True
        count = int(shared.sum())
        if count < LEAST * vocabulary:
            raise ValueError(
                f"drafter must share at least {LEAST:.0%} of the target's {vocabulary} tokens, got "
                f"{count}; use a drafter whose tokenizer splits text alike"
            )
        return cls(ids, shared)

    def ban(self, tokens: Sequence[int]) -> None:
        """Never draft ``tokens`` (picture placeholders), nor show them to the drafter."""
        self.shared[list(tokens)] = False
        self.ids[list(tokens)] = 0

    def to_drafter(self, tokens: Tensor) -> Tensor:
        """The drafter's ids [...] of the target's ``tokens`` [...]."""
        return self.ids.to(tokens.device)[tokens]

    def from_drafter(self, logits: Tensor) -> Tensor:
        """Logits [..., V] over the target's tokens of the drafter's ``logits`` [..., v]."""
        shared = self.shared.to(logits.device)
        return logits[..., self.ids.to(logits.device)].masked_fill(~shared, float("-inf"))


def _texts(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """The bytes of every token (perhaps part of a character); special tokens have their names."""
    vocabulary = tokenizer.get_vocab()
    in_bytes = any("\u0120" in token for token in vocabulary)
    spell = _spelled_in_bytes if in_bytes else _spelled_in_letters
    return {i: spell(token) for token, i in vocabulary.items()}


def _spelled_in_bytes(token: str) -> bytes:
    spelled = BYTES.keys() >= set(token)
    return bytes(BYTES[letter] for letter in token) if spelled else token.encode()


def _spelled_in_letters(token: str) -> bytes:
    match = BYTE.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token.replace(SPACE, " ").encode()
