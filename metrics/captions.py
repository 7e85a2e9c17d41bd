"""Captions against references: BLEU by sacrebleu, CIDEr by pycocoevalcap (extra
``specmm[captions]``).

CIDEr is that package's own ``Cider`` on text tokenised here: lower case, words and numbers, no
punctuation. The published numbers use Stanford's tokenizer (Java); the two differ on abbreviations
and hyphens, so the protocol says which it was, and such numbers should not be compared with the
leaderboard's to the last digit.
"""

from __future__ import annotations

import re
from typing import Any

from specmm.metrics.measurement import Measurement
from specmm.metrics.questions import Answers, Predictions, check_questions

EXTRA = "captions need the packages sacrebleu and pycocoevalcap, got none; run: pip install 'specmm[captions]'"


def bleu(predictions: Predictions, answers: Answers) -> Measurement:
    """Corpus BLEU-4 in [0, 100] (Papineni et al. 2002) with sacrebleu's default tokenizer;
    ``parts`` are BLEU's own.

    Raises ``ValueError`` unless both name the same questions, and where sacrebleu is missing.
    """
    check_questions(predictions, answers)
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise ValueError(EXTRA) from None
    judge = BLEU()
    most = max(len(given) for given in answers.values())
    references: Any = [[_nth(given, i) for given in answers.values()] for i in range(most)]
    score = judge.corpus_score([predictions[q] for q in answers], references)
    parts = {f"precision_{n}": p for n, p in enumerate(score.precisions, 1)} | {
        "brevity_penalty": score.bp
    }
    protocol = {
        "signature": str(judge.get_signature()),
        "references": most,
        "counts": [len(answers)],
    }
    return Measurement("bleu", score.score, protocol, parts)


def cider(predictions: Predictions, answers: Answers) -> Measurement:
    """CIDEr-D (Vedantam et al. 2015, sec. 6), 10 at the most; document frequencies come from
    ``answers`` themselves.

    Raises ``ValueError`` unless both name the same questions, below two questions (every frequency
    would be 1 and every score 0), and where pycocoevalcap is missing.
    """
    check_questions(predictions, answers)
    if len(answers) < 2:
        raise ValueError(
            f"CIDEr needs at least 2 captions to weigh words by, got {len(answers)}; add more"
        )
    try:
        from pycocoevalcap.cider.cider import Cider
    except ImportError:
        raise ValueError(EXTRA) from None
    given = {q: [tokenised(a) for a in texts] for q, texts in answers.items()}
    value, _ = Cider().compute_score(given, {q: [tokenised(predictions[q])] for q in answers})
    protocol: dict[str, Any] = {
        "library": "pycocoevalcap",
        "tokens": "lower case, words and numbers, no punctuation",
    }
    return Measurement("cider", float(value), {**protocol, "counts": [len(answers)]})


def tokenised(text: str) -> str:
    """Words and numbers of ``text`` in lower case, a space between them."""
    return " ".join(re.findall(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:'[^\W\d_]+)?", text.lower()))


def _nth(texts: Any, i: int) -> str | None:
    """sacrebleu's way of saying that a caption has fewer references: None."""
    return texts[i] if i < len(texts) else None
