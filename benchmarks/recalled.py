"""Drafts from what was said, by suffix decoding and token recycling, against prompt lookup.

    OMP_NUM_THREADS=1 python -m benchmarks.recalled

Greedy, one thread, one prompt at a time, methods in turn; processor seconds of whole calls, summed
over a kind's prompts. Texts that repeat themselves are of SmolLM2, as ``pocket/coder`` cannot copy;
the held-out code is of ``pocket/coder``. Tokens of all methods are compared with plain decoding's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, Dtype, Out, Row, Threads, label, write_results
from benchmarks.text_speed import places
from benchmarks.vlm_speed import begin
from specmm import methods
from specmm.core.stats import Stats
from specmm.loading.hardware import named_dtype
from specmm.recipes.training.texts import read_files
from specmm.runs.race import in_turn
from specmm.text.pipeline import TextPipeline

LENGTH = 96
METHODS = (methods.AR(), methods.PromptLookup(), methods.Suffix(), methods.Recycle())
CODE = {
    ("read_lines", "load_lines"): '''def read_lines(path, encoding="utf-8", strip=True):
    """Read all lines of a text file and return them as a list."""
    lines = []
    with open(path, encoding=encoding) as handle:
        for line in handle:
            if strip:
                line = line.strip()
            lines.append(line)
    return lines
''',
    ("Stack", "Pile"): '''class Stack:
    """A stack of items, last in, first out."""

    def __init__(self, items=None):
        self.items = list(items or [])

    def push(self, item):
        """Put an item on top."""
        self.items.append(item)

    def pop(self):
        """Take the item on top."""
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
''',
    ("values", "numbers"): '''def moving_average(values, window):
    """Return the moving averages of a list of numbers."""
    if window < 1:
        raise ValueError("window must be at least 1")
    averages = []
    for start in range(len(values) - window + 1):
        part = values[start : start + window]
        averages.append(sum(part) / window)
    return averages
''',
}
SHORT = '''def {name}(first, second):
    """Return the sum of two numbers."""
    total = first + second
    return total
'''
EXTRACTION = [
    """Order 1: name: John Smith, city: London, item: blue lamp, price: 20
Order 2: name: Mary Jones, city: Paris, item: red chair, price: 35
Order 3: name: Carl Young, city: Rome, item: green table, price: 80
Order 4: name: Anna Brown, city: Oslo, item: white desk, price: 110

As JSON:
[{"name": "John Smith", "city": "London", "item": "blue lamp", "price": 20},
""",
    """Patient: Alice Weber. Diagnosis: seasonal allergy. Medication: cetirizine 10 mg once daily.
Patient: Boris Novak. Diagnosis: high blood pressure. Medication: lisinopril 20 mg once daily.
Patient: Clara Diaz. Diagnosis: type 2 diabetes. Medication: metformin 500 mg twice daily.
Patient: David Kim. Diagnosis: asthma. Medication: albuterol 90 mcg as needed.

Table:
| Patient | Diagnosis | Medication |
|---|---|---|
| Alice Weber | seasonal allergy | cetirizine 10 mg once daily |
""",
    """The conference on machine learning takes place in Vienna from July 21 to July 27. The \
conference on computer vision takes place in Seattle from June 17 to June 21. The conference on \
language processing takes place in Bangkok from August 11 to August 16.

Events:
- event: conference on machine learning; place: Vienna; dates: July 21 to July 27
""",
]
LOGS = [
    'INSERT INTO users (id, name, email, created_at) VALUES ({i}, "user{i}", '
    '"user{i}@example.com", "2024-01-0{i}");\n',
    "2024-03-01 12:00:1{i} INFO query=SELECT id, total FROM orders WHERE customer_id = 10{i} "
    "ORDER BY created_at DESC LIMIT 10 rows=10 duration={i}ms\n",
    "UPDATE stock SET amount = amount - {i}, changed_at = '2024-05-0{i} 08:00:00' WHERE "
    "shop_id = 7 AND product_id = 4{i};\n",
]
PROSE = [
    "The lighthouse stood on a rock far from the shore, and its keeper",
    "Photosynthesis is the process by which",
    "Here are three tips for writing clear emails:\n1.",
]


def edit(code: str, old: str, new: str) -> str:
    """A prompt for ``code`` with a name replaced, after an example of that."""
    shown = "Code:\n```python\n{}```\nThe same code, with {} renamed to {}:\n```python\n"
    example = shown.format(SHORT.format(name="add"), "add", "plus") + SHORT.format(name="plus")
    return example + "```\n\n" + shown.format(code, old, new)


def prompts(coder: TextPipeline) -> Mapping[str, list[str]]:
    """By kind; those of held-out code for ``coder``."""
    texts = [text for text in read_files(True).values() if text.count("\n") > 30]
    return {
        "code edits": [edit(code, *names) for names, code in CODE.items()],
        "extraction": EXTRACTION,
        "SQL-like logs": ["".join(line.format(i=i) for i in range(1, 6)) for line in LOGS],
        "prose, without repeats": PROSE,
        "held-out code": [places(coder, texts, 1, seed).prompts[0] for seed in range(12)],
    }


def measure(pipe: TextPipeline, kind: str, asked: list[str], repeats: int) -> list[Row]:
    """Every method on every prompt, in turn."""
    seconds = [0.0] * len(METHODS)
    stats = [Stats() for _ in METHODS]
    for method in METHODS:
        pipe(asked[0], method=method, max_new_tokens=8)  # warm-up
    texts: list[list[str]] = [[] for _ in METHODS]
    for turn, prompt in enumerate(asked * repeats):
        for i in in_turn(range(len(METHODS)), turn):
            start = time.process_time()
            out = pipe(prompt, method=METHODS[i], max_new_tokens=LENGTH)
            seconds[i] += time.process_time() - start
            stats[i].add(out.stats)
            texts[i] += out.texts
    plain, lookup = seconds[0], seconds[1]
    return [
        {
            "kind": kind,
            "model": pipe.name,
            "method": label(method),  # type: ignore[arg-type]
            "prompts": len(asked),
            "over_plain": plain / seconds[i],
            "over_prompt_lookup": lookup / seconds[i],
            "tau": stats[i].tau,
            "token_equal": texts[i] == texts[0],
        }
        for i, method in enumerate(METHODS)
    ]


def main(
    copier: Annotated[str, typer.Option(help="A model that can copy.")] = "pocket/smollm2",
    repeats: Annotated[int, typer.Option(min=1, help="Passes over the prompts.")] = 2,
    dtype: Dtype = "float32",
    threads: Threads = 1,
    out: Out = RESULTS,
) -> None:
    """Write ``recalled.json`` and ``.csv`` kind by kind."""
    facts = begin(threads, model=copier, dtype=dtype)
    options: dict[str, Any] = dict(torch_dtype=named_dtype(dtype), device="cpu")
    coder = TextPipeline.from_pretrained("pocket/coder", **options)
    pipe = TextPipeline.from_pretrained(copier, **options)
    rows = list[Row]()
    for kind, asked in prompts(coder).items():
        rows += measure(coder if kind == "held-out code" else pipe, kind, asked, repeats)
        write_results(out, "recalled", rows, facts)


if __name__ == "__main__":
    typer.run(main)
