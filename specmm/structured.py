"""Answers constrained by a JSON schema, a regular expression or a grammar, with any method.

>>> pipe = specmm.TextPipeline.from_pretrained("pocket/coder", method="block")
>>> pipe("x = ", grammar=specmm.structured.json_schema({"type": "array"}), max_new_tokens=32)

xgrammar (arXiv 2411.15100) computes which tokens are allowed next. Its matchers can roll back, so a
draft tree is checked path by path, and never below a forbidden token.

Shape letters: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from specmm.core.drafter import BatchingDrafter, Drafter, Feedback, widened
from specmm.core.processors import History, Processor
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape, paths
from specmm.loading.extras import needed

BITS = 32  # of a mask's word
LATEST = 256  # masks that are kept: those of a round are asked for twice
_compiled: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Grammar:
    """A constraint on answers: ``kind`` is "json_schema", "regex", "grammar" (EBNF as GBNF's) or
    "structural_tag" (xgrammar's), ``source`` its text. JSON may have blanks and line breaks
    anywhere (``any_whitespace``), or has one blank after each comma and colon.
    """

    kind: str
    source: str
    any_whitespace: bool = True

    def compiled(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Sequence[int]
    ) -> Any:
        """The grammar compiled for the tokens of ``tokenizer``, with the model's ``vocabulary``
        size and end tokens ``ends``; cached.

        Raises ``ValueError`` for a source that is invalid for its kind, and without xgrammar.
        """
        cached = _compiled.setdefault(tokenizer, {})
        key = (self, vocabulary, tuple(ends))
        if key not in cached:
            cached[key] = self._compile(tokenizer, vocabulary, list(ends))
        return cached[key]

    def _compile(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: list[int]) -> Any:
        """The grammar compiled by xgrammar for a tokenizer."""
        with needed(f"a {self.kind}", "structured"):
            import xgrammar
        if not ends:
            raise ValueError(f"a {self.kind} needs a model with an end token, this one has none")
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocabulary, stop_token_ids=ends
            )
            compiler = xgrammar.GrammarCompiler(info)
            how: dict[str, Callable[[str], Any]] = {
                "json_schema": partial(
                    compiler.compile_json_schema, any_whitespace=self.any_whitespace
                ),
                "regex": compiler.compile_regex,
                "grammar": compiler.compile_grammar,
                "structural_tag": compiler.compile_structural_tag,
            }
            return how[self.kind](self.source)
        except Exception as error:  # several classes, none of them documented
            reason = " ".join(str(error).split()) or type(error).__name__
            reason = re.sub(r"^\[[\d:]+\] \S+: ", "", reason)  # when, and where in its source
            raise ValueError(f"{self.kind} cannot be used, got: {reason}") from error

    def __str__(self) -> str:
        names = {"regex": "regular expression", "grammar": "EBNF"}
        return names.get(self.kind, self.kind.replace("json", "JSON").replace("_", " "))


def json_schema(
    schema: str | Path | Mapping[str, Any] | type, any_whitespace: bool = True
) -> Grammar:
    """JSON that follows a ``schema``: a dict, its text, a file, or a pydantic class. Without
    ``any_whitespace`` it is on one line, which forces more tokens, so answers are faster.

    Raises ``ValueError`` if the schema is not a JSON object.
    """
    model = getattr(schema, "model_json_schema", None)
    parsed: Any = schema if model is None else model()
    if isinstance(parsed, str | Path):
        text = _text(parsed)
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise ValueError(f"json_schema must be JSON, got {text[:60]!r} ({error})") from error
    if not isinstance(parsed, Mapping):
        raise ValueError(f"json_schema must be a JSON object, got {type(parsed).__name__}")
    return Grammar("json_schema", json.dumps(parsed), any_whitespace)


def of_call(value: Any) -> Grammar:
    """The grammar in a call's argument: a :class:`Grammar`, a JSON schema as a dict, or a pydantic
    class.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(value, Grammar):
        return value
    if isinstance(value, Mapping) or hasattr(value, "model_json_schema"):
        return json_schema(value)
    raise ValueError(
        f"grammar must be of specmm.structured or a dict, got {type(value).__name__}; give "
        "specmm.structured.json_schema(…), regex(…) or grammar(…)"
    )


def regex(pattern: str) -> Grammar:
    """Texts that match all of ``pattern``."""
    return Grammar("regex", pattern)


def grammar(ebnf: str | Path) -> Grammar:
    """Texts of the rule ``root`` of an EBNF grammar, given as text or a file."""
    return Grammar("grammar", _text(ebnf))


def _text(text: str | Path) -> str:
    """``text``, or the content of the file that it names."""
    file = Path(text) if isinstance(text, Path) or len(text) < 256 else None
    if isinstance(text, Path) or (file is not None and "\n" not in text and file.is_file()):
        assert file is not None
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} must be a file of text, got: {error}") from error
    return text


@dataclass(frozen=True)
class Mask:
    """The allowed tokens, as bits of ``words`` [V / 32] int32."""

    words: Tensor

    def __contains__(self, token: int) -> bool:
        return bool(int(self.words[token // BITS]) >> token % BITS & 1)

    def others(self, like: Tensor) -> Tensor:
        """The tokens that are not allowed, [V] bool, on the device of ``like`` [V]."""
        places = torch.arange(BITS, dtype=torch.int32)
        bits = (self.words[:, None] >> places & 1).flatten()[: len(like)]
        return (bits == 0).to(like.device)


class Matchers:
    """The tokens allowed after an answer, by row; matchers roll back to the common prefix."""

    def __init__(self, compiled: Sequence[Any]) -> None:
        self.compiled = list(compiled)  # one for all rows, or one a row
        self.vocabulary = int(self.compiled[0].tokenizer_info.vocab_size)
        self._rows: dict[int, tuple[Any, list[int]]] = {}
        self._masks: dict[tuple[int, ...], Mask | None] = {}  # the latest, by row and answer

    def mask(self, row: int, answer: Sequence[int]) -> Mask | None:
        """The tokens allowed after ``answer``; None if it is complete or breaks the grammar.

        Raises ``ValueError`` if no token of the tokenizer can continue it.
        """
        key = (row, *answer)
        if key not in self._masks:
            if len(self._masks) == LATEST:
                self._masks.clear()
            self._masks[key] = self._mask(row, answer)
        return self._masks[key]

    def forced(self, row: int, answer: Sequence[int]) -> bytes:
        """The text that must follow ``answer``; empty if several texts may."""
        matcher = self._matcher(row, answer)
        return b"" if matcher is None else str(matcher.find_jump_forward_string()).encode()

    def _mask(self, row: int, answer: Sequence[int]) -> Mask | None:
        """The allowed tokens as :meth:`mask` gives them, not cached."""
        from xgrammar import allocate_token_bitmask

        matcher = self._matcher(row, answer)
        if matcher is None:
            return None
        words = allocate_token_bitmask(1, self.vocabulary)
        matcher.fill_next_token_bitmask(words)
        if not bool(words.any()):
            raise ValueError(
                "the grammar must allow text that the tokenizer can spell, got none; use "
                "characters that it has"
            )
        return Mask(words[0])

    def _matcher(self, row: int, answer: Sequence[int]) -> Any:
        """xgrammar's matcher of ``row`` after ``answer``; None if no token may follow."""
        from xgrammar import GrammarMatcher

        if row not in self._rows:
            compiled = self.compiled[row if len(self.compiled) > 1 else 0]
            self._rows[row] = GrammarMatcher(compiled), []
        matcher, read = self._rows[row]
        pairs = enumerate(zip(read, answer, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(read), len(answer)))
        if same < len(read):
            matcher.rollback(len(read) - same)
            del read[same:]
        for token in answer[same:]:
            if matcher.is_terminated() or not matcher.accept_token(token):
                return None
            read.append(token)
        return None if matcher.is_terminated() else matcher


@dataclass(frozen=True)
class Spelling:
    """A grammar's ``matchers``, and the ``ids`` of tokens by their bytes (at most ``longest``), to
    spell forced text.
    """

    matchers: Matchers
    ids: Mapping[bytes, int]
    longest: int

    @classmethod
    def of(cls, matchers: Matchers, tokenizer: PreTrainedTokenizerBase) -> Spelling:
        """Spells the text that ``matchers`` force in ``tokenizer``'s tokens; makes one table."""
        cached = _compiled.setdefault(tokenizer, {})
        if cls not in cached:
            texts = list(matchers.compiled[0].tokenizer_info.decoded_vocab)
            ids = {text: i for i, text in reversed(list(enumerate(texts))) if text}
            cached[cls] = ids, max(map(len, ids))
        return cls(matchers, *cached[cls])

    def forced(self, row: int, answer: Sequence[int]) -> int | None:
        """The longest token of the text that must follow ``answer``; None if several texts may."""
        text = self.matchers.forced(row, answer)
        starts = (text[:n] for n in range(min(len(text), self.longest), 0, -1))
        return next((self.ids[start] for start in starts if start in self.ids), None)


class SpelledDrafts:
    """The drafter ``inner`` with its chains made to fit a ``spelling``: a draft that is not allowed
    is replaced by a token of the forced text, or ends the chain if no text is forced.

    ``answer`` gives a row's tokens before the root. The recorded distributions are those of the
    final tokens.
    """

    def __init__(
        self, inner: Drafter, spelling: Spelling, answer: Callable[[int], list[int]]
    ) -> None:
        self.inner = inner
        self.spelling = spelling
        self.answer = answer
        self.max_nodes = inner.max_nodes
        self.max_depth = inner.max_depth
        self.coupled = getattr(inner, "coupled", False)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """As ``inner``."""
        self.inner.begin(feedback, clock)

    def start_row(self, row: int) -> None:
        """As ``inner``, where rows can start new samples."""
        assert isinstance(self.inner, BatchingDrafter)
        self.inner.start_row(row)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The tree of ``inner``; chains are made to fit the spelling."""
        tree = self.inner.propose(widened(feedback, self.max_depth), uniforms)
        if not tree.shape.is_chain:
            return tree
        rows = [
            self._spelled(row, ids, None if tree.probs is None else tree.probs[row])
            for row, ids in enumerate(tree.tokens[:, : tree.levels + 1].tolist())
        ]
        depth = max(len(ids) for ids, _ in rows) - 1
        tokens = [ids + [0] * (depth + 1 - len(ids)) for ids, _ in rows]
        spelled_tokens = torch.tensor(tokens, device=tree.tokens.device)
        probs = None
        if tree.probs is not None:  # drafts without distributions are certain
            probs = F.one_hot(spelled_tokens, tree.probs.shape[-1]).to(tree.probs)
            for row, (_, drawn) in enumerate(rows):
                for node, node_probs in drawn.items():
                    probs[row, node] = node_probs
        return DraftTree(spelled_tokens, TreeShape.chain(depth, spelled_tokens.device), probs)

    def _spelled(
        self, row: int, drafts: list[int], probs: Tensor | None
    ) -> tuple[list[int], dict[int, Tensor]]:
        """Root and final drafts of a ``row``, and their distributions [V] by node, if ``drafts``
        were drawn from ``probs`` [N, V].
        """
        answer = self.answer(row)
        tokens = drafts[:1]
        drawn: dict[int, Tensor] = {}
        for node in range(1, self.max_depth + 1):
            mask = self.spelling.matchers.mask(row, answer + tokens)
            if mask is None:
                break
            token = drafts[node] if node < len(drafts) else None
            may = token is not None and token in mask
            must = None if may and probs is None else self.spelling.forced(row, answer + tokens)
            if token is not None and probs is not None:
                allowed = probs[node].masked_fill(mask.others(probs[node]), 0)
                if must is not None:
                    allowed[must] += 1 - allowed.sum()
                drawn[node] = allowed / allowed.sum()
            spelled = token if may else must
            if spelled is None:
                drawn.pop(node, None)
                break
            tokens.append(spelled)
        return tokens, drawn


@dataclass
class Constrained:
    """The processor ``plain`` restricted to the tokens that a grammar allows; a
    :class:`specmm.hf.models.target.ProbsProcessor`.
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
            masks: list[Mask | None] = []
            for node, (parent, path) in enumerate(paths(tree, row)):
                before = None if parent < 0 else masks[parent]
                dead = parent >= 0 and (before is None or path[-1] not in before)
                masks.append(None if dead else self.matchers.mask(row, [*answer, *path]))
                if (mask := masks[-1]) is not None:
                    node_logits = logits[row, node]
                    node_logits.masked_fill_(mask.others(node_logits), float("-inf"))
        return self.plain.probs(logits, history, tree, out)


class GrammarProcessor(LogitsProcessor):
    """A grammar for transformers' ``generate``, with or without ``custom_generate``, and in place
    of xgrammar's own class, which would see rejected drafts.

    It depends only on the ids of each call, in any order of calls.
    """

    def __init__(self, *compiled: Any) -> None:
        self.matchers = Matchers(compiled)
        self.width = 0  # the prompt's

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] with -inf for tokens that are not allowed."""
        self.width = self.width or input_ids.shape[1]
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.width :].tolist()):
            mask = self.matchers.mask(row, ids)
            if mask is not None:
                scores[row].masked_fill_(mask.others(scores[row]), float("-inf"))
        return scores
