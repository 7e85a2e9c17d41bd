"""The pictures of a round, one a family: ``python docs/images/make.py`` writes them as SVG.

A picture is rows of boxes with words and arrows between them. Colours say what a box is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

FILLS = {
    "text": "#eef2f5",  # what is there already
    "draft": "#fff3cd",  # a guess
    "kept": "#d3f0e0",  # accepted
    "lost": "#f6d5d5",  # rejected
    "next": "#cfe2ff",  # drawn by the target
    "model": "#e2dcf5",  # a network
}
INK, HIGH, GAP = "#24292f", 34, 10


@dataclass
class Picture:
    """Boxes and arrows that are added one after the other."""

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def words(self, x: float, y: float, text: str, anchor: str = "start", size: int = 14) -> None:
        """A line of text whose baseline begins (or ends, or has its middle) at x, y."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{text}</text>'
        )

    def box(self, x: float, y: float, wide: float, text: str, kind: str, high: int = HIGH) -> None:
        """A box with centred words, several lines by ``|``."""
        dashed = ' stroke-dasharray="4 3"' if kind == "lost" else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high}" rx="5" '
            f'fill="{FILLS[kind]}" stroke="#57606a"{dashed}/>'
        )
        lines = text.split("|")
        for i, line in enumerate(lines):
            self.words(
                x + wide / 2, y + high / 2 + 5 + 17 * (i - (len(lines) - 1) / 2), line, "middle"
            )

    def row(self, x: float, y: float, wide: float, cells: list[tuple[str, str]]) -> None:
        """Boxes of one width side by side: (words, kind)."""
        for i, (text, kind) in enumerate(cells):
            self.box(x + i * (wide + GAP), y, wide, text, kind)

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through ``points`` with a head at its end."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )

    def legend(self, kinds: dict[str, str]) -> None:
        """What the colours mean, along the lower edge."""
        x = 20.0
        for kind, text in kinds.items():
            self.parts.append(
                f'<rect x="{x:g}" y="{self.height - 24}" width="14" height="14" '
                f'fill="{FILLS[kind]}" stroke="#57606a"/>'
            )
            self.words(x + 20, self.height - 12, text, size=13)
            x += 40 + 6.9 * len(text)

    def save(self, name: str) -> None:
        """Write the file beside this one."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" font-family="system-ui, sans-serif" fill="{INK}">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        )
        back = f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        lines = [head, f"<title>{self.title}</title>", marker, back, *self.parts, "</svg>\n"]
        Path(__file__).with_name(name).write_text("\n".join(lines))


USUAL = {
    "text": "committed",
    "draft": "draft",
    "kept": "kept",
    "lost": "rejected",
    "next": "drawn anew",
}


def one_round() -> None:
    """The round that all families share."""
    p = Picture("One round: draft, score, accept, commit", 760, 250)
    for x, words in (
        (20, "drafter|proposes a tree"),
        (280, "target|scores it in one forward"),
        (540, "acceptance rule|keeps a path"),
    ):
        p.box(x, 40, 200, words, "model", 56)
    p.arrow((220, 68), (280, 68))
    p.arrow((480, 68), (540, 68))
    p.words(250, 30, "drafts, q", "middle", 13)
    p.words(510, 30, "p of each node", "middle", 13)
    p.arrow((640, 96), (640, 176), (480, 176))
    p.box(280, 150, 200, "commit: the KV cache|keeps the path", "text", 52)
    p.arrow((280, 176), (120, 176), (120, 96))
    p.words(660, 136, "path and", size=13)
    p.words(660, 153, "next token", size=13)
    p.words(30, 200, "hidden states, rejected drafts", size=13)
    p.words(
        380,
        236,
        "Several tokens a round instead of one; an exact rule leaves their distribution as it was.",
        "middle",
        13,
    )
    p.save("round.svg")


def llamagen() -> None:
    """A chain of drafts of picture tokens."""
    p = Picture("LlamaGen: a block drafter proposes tokens, one forward verifies them", 760, 300)
    p.words(20, 30, "1. a block drafter reads the last states and drafts six tokens in one pass")
    p.row(
        20,
        44,
        70,
        [
            ("… 17", "text"),
            ("402", "text"),
            *[(t, "draft") for t in ("402", "88", "91", "88", "13", "7")],
        ],
    )
    p.words(20, 112, "2. the transformer scores all six in one forward, with guidance")
    p.row(20, 126, 70, [("", "text"), ("p", "next"), *[("p", "next")] * 6])
    p.words(
        20,
        194,
        "3. drafts are kept from the left while the rule accepts them; the next is drawn from p",
    )
    p.row(
        20,
        208,
        70,
        [
            ("… 17", "text"),
            ("402", "text"),
            ("402", "kept"),
            ("88", "kept"),
            ("91", "kept"),
            ("90", "next"),
            ("13", "lost"),
            ("7", "lost"),
        ],
    )
    p.legend(USUAL)
    p.save("round-llamagen.svg")


def mar() -> None:
    """Speculation along a denoising chain."""
    p = Picture("MAR: denoising steps are drafted and accepted along the chain", 760, 290)
    p.words(20, 30, "1. the transformer gives a condition for each place that is drawn now")
    p.box(20, 42, 150, "masked transformer", "model")
    p.arrow((170, 59), (230, 59))
    p.box(230, 42, 120, "condition", "text")
    p.words(
        20,
        110,
        "2. the head's next sixteen denoising steps are guessed from its last one (Gaussians)",
    )
    p.row(
        20, 122, 76, [("x 100", "text"), *[(f"x {n}", "draft") for n in (99, 98, 97, 96, 95, 94)]]
    )
    p.words(
        20,
        190,
        "3. the head scores all of them at once; a ratio of densities accepts a stretch of them",
    )
    p.row(
        20,
        202,
        76,
        [
            ("x 100", "text"),
            *[(f"x {n}", "kept") for n in (99, 98, 97, 96)],
            ("x 95", "next"),
            ("x 94", "lost"),
        ],
    )
    p.legend(USUAL)
    p.save("round-mar.svg")


def var() -> None:
    """CoDe's division of scales."""
    p = Picture(
        "VAR with CoDe: the large model draws the coarse scales, the small one the fine ones",
        760,
        250,
    )
    x = 20.0
    for i, side in enumerate((1, 2, 3, 4, 6, 8, 10)):
        wide = 26 + 9.4 * side
        kind = "next" if i < 4 else "draft"
        p.box(x, 170 - wide, wide, f"{side}×{side}", kind, int(wide))
        x += wide + 14
    p.arrow((20, 186), (290, 186))
    p.words(155, 206, "large model, n scales", "middle")
    p.arrow((300, 186), (690, 186))
    p.words(495, 206, "small model, the other scales", "middle")
    p.words(
        20,
        24,
        "Each scale is drawn at once and sees all before it; the fine ones have most tokens.",
    )
    p.words(
        20,
        240,
        "No draft is verified: the certificate is heuristic. speculative verifies, and is exact.",
        size=13,
    )
    p.save("round-var.svg")


def vlm() -> None:
    """A drawn chain and a tree of an answer's words."""
    p = Picture(
        "Vision-language models: a head reads the target's states and drafts an answer", 760, 346
    )
    p.words(
        20, 30, "1. picture and question are read once; the head reads the target's states of them"
    )
    p.row(20, 44, 110, [("picture", "text"), ("what is it?", "text"), ("A", "text")])
    p.arrow((370, 61), (430, 61))
    p.box(430, 44, 130, "MSD, EAGLE-3", "model")
    p.words(20, 116, "2. it drafts a tree of words; the target scores every path in one forward")
    p.box(20, 158, 70, "A", "text")
    for y, cells in ((130, ("red", "heart", "and")), (186, ("pink", "flower", "."))):
        for i, word in enumerate(cells):
            kind = "kept" if y == 130 and i < 2 else "lost"
            p.box(150 + 130 * i, y, 90, word, kind)
            if i:
                p.arrow((110 + 130 * i, y + 17), (150 + 130 * i, y + 17))
        p.arrow((90, 175), (150, y + 17))
    p.words(
        20,
        252,
        "3. the longest accepted path is kept, and the token after it drawn from the target",
    )
    p.row(20, 262, 90, [("A", "text"), ("red", "kept"), ("heart", "kept"), (".", "next")])
    p.legend(USUAL)
    p.save("round-vlm.svg")


def text() -> None:
    """A block filled in by a diffusion model."""
    p = Picture("Text: a diffusion model fills a block of masks in one forward", 760, 310)
    p.words(20, 30, "1. masks stand after the text")
    p.row(20, 42, 84, [("def", "text"), ("add(a, b):", "text"), *[("mask", "draft")] * 5])
    p.words(20, 106, "2. one forward of the drafter gives a distribution for every mask")
    p.row(
        20,
        118,
        84,
        [("", "text"), ("", "text"), *[(w, "draft") for w in ("return", "a", "+", "a", ";")]],
    )
    p.words(
        20,
        182,
        "3. the target scores the block in one forward; block verification keeps a prefix of it",
    )
    p.row(
        20,
        194,
        84,
        [
            ("def", "text"),
            ("add(a, b):", "text"),
            ("return", "kept"),
            ("a", "kept"),
            ("+", "kept"),
            ("b", "next"),
            (";", "lost"),
        ],
    )
    p.words(
        20,
        262,
        "An autoregressive drafter needs one forward a token, a diffusion model one a block.",
        size=13,
    )
    p.legend(USUAL)
    p.save("round-text.svg")


def jacobi() -> None:
    """Jacobi drafts of two rounds."""
    p = Picture(
        "Jacobi drafts: what is not kept is guessed anew from the newest distributions", 760, 300
    )
    p.words(20, 30, "round n: guesses, each with the distribution it was drawn from")
    p.row(20, 42, 84, [("31", "text"), *[(t, "draft") for t in ("12", "12", "7", "40", "5")]])
    p.words(20, 106, "one forward scores all of them: the first are kept, one is drawn anew")
    p.row(
        20,
        118,
        84,
        [
            ("31", "text"),
            ("12", "kept"),
            ("12", "kept"),
            ("9", "next"),
            ("40", "lost"),
            ("5", "lost"),
        ],
    )
    p.words(
        20,
        182,
        "round n + 1: the rest of the window is guessed from the distributions just computed",
    )
    p.row(
        20,
        194,
        84,
        [("… 12", "text"), ("9", "text"), *[(t, "draft") for t in ("41", "5", "5", "17", "2")]],
    )
    p.words(20, 258, "No drafter is needed, and no training.", size=13)
    p.legend(USUAL)
    p.save("round-jacobi.svg")


if __name__ == "__main__":
    for make in (one_round, llamagen, mar, var, vlm, text, jacobi):
        make()
