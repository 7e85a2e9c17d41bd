"""Shows a round: the drafted tree, the accepted path, and the probabilities.

Shape letters: B rows (the first is shown), N nodes, V vocabulary, D deepest level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import torch

from specmm.app.tables import table
from specmm.core.decode import DecodedRound

COLUMNS = ("token", "after", "drafter's q", "target's p", "chance to be kept", "outcome")
ACROSS = 112  # pixels between levels
DOWN = 34  # between leaves
LONGEST = 11  # letters of a token in the tree
KEPT = "#15803d"
REJECTED = "#b91c1c"
LINE = "#94a3b8"
Named = Callable[[int], str]


@dataclass(frozen=True)
class Node:
    """A draft, the root (``parent`` -1), or the token that ended the round (not ``drafted``).

    ``q`` is the drafter's probability of it, None if it was chosen, not drawn; ``p`` is the
    target's; ``accept`` is the probability that the rule keeps it when it is tested.
    """

    token: int
    parent: int
    q: float | None
    p: float
    accept: float
    kept: bool
    drafted: bool = True


@torch.inference_mode()
def nodes_of(round_: DecodedRound) -> list[Node]:
    """The first row's nodes by number, followed by the recovered or bonus token."""
    tree, probs, rule, result = round_
    accept = rule.decisions(tree, probs).accept[0].tolist()
    parents = tree.shape.parents[0].tolist()
    depths = tree.shape.depths[0].tolist()
    path = [node for node in result.path[0].tolist() if node >= 0]
    nodes = []
    for n, token in enumerate(tree.tokens[0].tolist()):
        if depths[n] > tree.levels:
            continue  # padding after a chain that was cut
        q = None if tree.probs is None else float(tree.probs[0, n, token])
        p = 1.0 if n == 0 else float(probs[0, parents[n], token])
        nodes.append(Node(token, parents[n], q, p, accept[n], n in path))
    last = path[-1]
    token = int(result.next_token[0])
    p = float(probs[0, last, token])
    return [*nodes, Node(token, last, None, p, 1.0, True, drafted=False)]


def table_of(nodes: Sequence[Node], named: Named) -> str:
    """The drafts of a round by ``COLUMNS``, as HTML."""
    return table([COLUMNS, *rows_of(nodes, named)], "Drafts")


def rows_of(nodes: Sequence[Node], named: Named) -> list[list[str]]:
    """The rows of a table of a round's drafts, by ``COLUMNS``."""
    rows = []
    for node in nodes[1:]:
        q = "chosen" if node.q is None else f"{node.q:.3f}"
        outcome = "kept" if node.kept else "dropped"
        if not node.drafted:
            q = "–"
            outcome = "the target's own"
        chance = f"{node.accept:.3f}" if node.drafted else "–"
        where = named(nodes[node.parent].token)
        rows.append([named(node.token), where, q, f"{node.p:.3f}", chance, outcome])
    return rows


def drawing_of(nodes: Sequence[Node], named: Named) -> str:
    """The tree as SVG: levels from left to right, the accepted path in green and bold."""
    places = _places(nodes)
    width = int(max(x for x, _ in places) + ACROSS)
    height = int(max(y for _, y in places) + DOWN)
    drafts = [node for node in nodes[1:] if node.drafted]
    kept = sum(node.kept for node in drafts)
    title = f"A tree of {len(drafts)} drafts, of which {kept} were kept"
    lines = []
    texts = []
    for node, (x, y) in zip(nodes, places, strict=True):
        colour = KEPT if node.kept else REJECTED
        if node.parent >= 0:
            px, py = places[node.parent]
            style = (
                f'stroke="{colour if node.kept else LINE}" stroke-width="{3 if node.kept else 1}"'
            )
            dash = "" if node.drafted else ' stroke-dasharray="4 3"'
            lines.append(f'<line x1="{px + 6}" y1="{py}" x2="{x - 6}" y2="{y}" {style}{dash}/>')
        lines.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>')
        weight = "700" if node.kept else "400"
        text = escape(_short(named(node.token)))
        anchor = f'x="{x}" y="{y - 9}" text-anchor="middle"'
        texts.append(f'<text {anchor} font-weight="{weight}" fill="currentColor">{text}</text>')
    body = "".join(lines + texts)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    svg = f'<svg {size} role="img" aria-label="{title}" font-size="12">{body}</svg>'
    return f'<div class="scrolled" tabindex="0" role="group" aria-label="Draft tree">{svg}</div>'


def _places(nodes: Sequence[Node]) -> list[tuple[float, float]]:
    """x and y of every node: leaves one below the other, parents centred on their children."""
    children: list[list[int]] = [[] for _ in nodes]
    depths = [0] * len(nodes)
    for n, node in enumerate(nodes[1:], 1):
        children[node.parent].append(n)
        depths[n] = depths[node.parent] + 1
    heights = [0.0] * len(nodes)
    leaves = 0

    def place(n: int) -> None:
        nonlocal leaves
        if not children[n]:
            heights[n] = leaves
            leaves += 1
        for child in children[n]:
            place(child)
        if children[n]:
            heights[n] = sum(heights[c] for c in children[n]) / len(children[n])

    place(0)
    return [(50 + d * ACROSS, 26 + h * DOWN) for d, h in zip(depths, heights, strict=True)]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
