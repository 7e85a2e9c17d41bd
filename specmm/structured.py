"""Answers that are spelled by a JSON schema, a regular expression or a grammar, by any method.

>>> pipe = specmm.TextPipeline.from_pretrained("pocket/coder", method="block")
>>> pipe("x = ", grammar=specmm.structured.json_schema({"type": "array"}), max_new_tokens=32)

xgrammar (arXiv 2411.15100) says which tokens may come next. Its matchers go back, so nodes of a
draft tree are asked along their paths, and none below a token that may not come.

Shape letters: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from specmm.extras import install
from specmm.processors import History, Processor
from specmm.tree import DraftTree, paths

BITS = 32  # of a word of a mask
_compiled: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Grammar:
    """How an answer is spelled: ``kind`` is "json_schema", "regex" or "grammar" (EBNF as GBNF's),
    ``source`` its text.
    """

    kind: str
    source: str

    def compiled(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Sequence[int]
    ) -> Any:
        """For the tokens of ``tokenizer``, of which the model has ``vocabulary`` and answers end by
        ``ends``; kept.

        Raises ``ValueError`` for a source that is none of its kind, and without xgrammar.
        """
        known = _compiled.setdefault(tokenizer, {})
        key = (self, vocabulary, tuple(ends))
        if key not in known:
            known[key] = self._compile(tokenizer, vocabulary, list(ends))
        return known[key]

    def _compile(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: list[int]) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(
                f"a {self.kind} needs xgrammar, which is not installed: {install('structured')}"
            ) from error
        if not ends:
            raise ValueError(f"a {self.kind} needs a model with an end token, this one has none")
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocabulary, stop_token_ids=ends
            )
            compiler = xgrammar.GrammarCompiler(info)
            how: dict[str, Callable[[str], Any]] = {
                "json_schema": compiler.compile_json_schema,
                "regex": compiler.compile_regex,
                "grammar": compiler.compile_grammar,
            }
            return how[self.kind](self.source)
        except Exception as error:  # of several classes, none of them documented
            said = " ".join(str(error).split()) or type(error).__name__
            said = re.sub(r"^\[[\d:]+\] \S+: ", "", said)  # when, and where in its source
            raise ValueError(f"{self.kind} cannot be used, got: {said}") from error

    def __str__(self) -> str:
        return {"json_schema": "JSON schema", "regex": "regular expression"}.get(self.kind, "EBNF")


def json_schema(schema: str | Path | Mapping[str, Any] | type) -> Grammar:
    """JSON by a ``schema``: a dict, its text, a file, or a class of pydantic.

    Raises ``ValueError`` for one that is no JSON object.
    """
    model = getattr(schema, "model_json_schema", None)
    found: Any = schema if model is None else model()
    if isinstance(found, str | Path):
        text = _text(found)
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"json_schema must be JSON, got {text[:60]!r} ({error})") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"json_schema must be a JSON object, got {type(found).__name__}")
    return Grammar("json_schema", json.dumps(found))


def of_call(given: Any) -> Grammar:
    """What a call is given as its grammar: one, a JSON schema as a dict, or a class of pydantic.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(given, Grammar):
        return given
    if isinstance(given, Mapping) or hasattr(given, "model_json_schema"):
        return json_schema(given)
    raise ValueError(
        f"grammar must be of specmm.structured or a dict, got {type(given).__name__}; give "
        "specmm.structured.json_schema(…), regex(…) or grammar(…)"
    )


def regex(pattern: str) -> Grammar:
    """Texts that match ``pattern`` as a whole."""
    return Grammar("regex", pattern)


def grammar(ebnf: str | Path) -> Grammar:
    """Texts of the rule ``root`` of an EBNF, its text or a file."""
    return Grammar("grammar", _text(ebnf))


def _text(given: str | Path) -> str:
    """A text itself, or what a file holds."""
    place = Path(given) if isinstance(given, Path) or len(given) < 256 else None
    if isinstance(given, Path) or (place is not None and "\n" not in given and place.is_file()):
        assert place is not None
        try:
            return place.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{place} must be a file of text, got: {error}") from error
    return given


class Matchers:
    """Which tokens may follow an answer, by row: matchers go back to where answers part."""

    def __init__(self, compiled: Sequence[Any]) -> None:
        self.compiled = list(compiled)  # one for all rows, or one a row
        self.vocabulary = int(self.compiled[0].tokenizer_info.vocab_size)
        self._rows: dict[int, tuple[Any, list[int]]] = {}

    def mask(self, row: int, answer: Sequence[int]) -> Tensor | None:
        """The tokens [V] bool that may follow ``answer``; None where it has ended, or cannot be.

        Raises ``ValueError`` where the tokenizer has no token that goes on.
        """
        from xgrammar import GrammarMatcher, allocate_token_bitmask

        if row not in self._rows:
            own = self.compiled[row if len(self.compiled) > 1 else 0]
            self._rows[row] = GrammarMatcher(own), []
        matcher, said = self._rows[row]
        pairs = enumerate(zip(said, answer, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(said), len(answer)))
        if same < len(said):
            matcher.rollback(len(said) - same)
            del said[same:]
        for token in answer[same:]:
            if matcher.is_terminated() or not matcher.accept_token(token):
                return None
            said.append(token)
        if matcher.is_terminated():
            return None
        words = allocate_token_bitmask(1, self.vocabulary)
        matcher.fill_next_token_bitmask(words)
        if not bool(words.any()):
            raise ValueError(
                "no token may follow by this grammar: the tokenizer cannot spell it; give one of "
                "letters that it has"
            )
        places = torch.arange(BITS, dtype=torch.int32)
        found: Tensor = (words[0, :, None] >> places & 1).flatten()[: self.vocabulary] > 0
        return found


@dataclass
class Constrained:
    """``plain``, of the tokens that a grammar lets come; a
    :class:`specmm.hf.target.ProbsProcessor`.
    """

    plain: Processor
    settings: Mapping[str, Any]  # for certificates
    matchers: Matchers
    stateful = True

    @property
    def greedy(self) -> bool:
        """As ``plain``."""
        return self.plain.greedy

    def check_vocabulary(self, size: int) -> None:
        """As ``plain``."""
        self.plain.check_vocabulary(size)

    def probs(
        self, logits: Tensor, history: History, tree: DraftTree | None, out: Tensor | None = None
    ) -> Tensor:
        """Distributions [B, N, V] of ``logits`` [B, N, V]."""
        logits = logits.clone()
        for row in range(len(logits)):
            answer = history.answer(row)
            masks: list[Tensor | None] = []
            for node, (parent, path) in enumerate(paths(tree, row)):
                before = None if parent < 0 else masks[parent]
                dead = parent >= 0 and (before is None or not bool(before[path[-1]]))
                masks.append(None if dead else self.matchers.mask(row, [*answer, *path]))
                if (mask := masks[-1]) is not None:
                    logits[row, node].masked_fill_(~mask.to(logits.device), float("-inf"))
        return self.plain.probs(logits, history, tree, out)


class GrammarProcessor(LogitsProcessor):
    """A grammar for transformers' ``generate``, with or without ``custom_generate``, and in place
    of xgrammar's own class, which would hear drafts that are rejected.

    It goes by the ids it is given, in any order.
    """

    def __init__(self, *compiled: Any) -> None:
        self.matchers = Matchers(compiled)
        self.width = 0  # of the prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] with negative infinity for tokens that may not come."""
        self.width = self.width or input_ids.shape[1]
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.width :].tolist()):
            mask = self.matchers.mask(row, ids)
            if mask is not None:
                scores[row].masked_fill_(~mask.to(scores.device), float("-inf"))
        return scores
