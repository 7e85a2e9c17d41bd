"""What the README and the pages show of ``benchmarks/results`` and of the models' cards.

``python -m benchmarks.pages`` writes the README's table and the picture of the gain; a test fails
where they are older than the results. MkDocs takes this file as its hook: in a page, a line
``<!-- results: NAME -->`` becomes a table of :data:`TABLES`, so no page holds a copied number, and
``<!-- file: PATH -->`` the file.
Nothing but the standard library is needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CARDS = ROOT / "specmm" / "zoo" / "pocket"
README = ROOT / "README.md"
SOURCES = ROOT / "build" / "api"
PICTURE = ROOT / "docs" / "images" / "gain.svg"
MARKS = ("<!-- speed: written by python -m benchmarks.pages -->\n\n", "\n<!-- end -->")
EXAMPLE = re.compile(r"(?:^ *>>> .*\n)+", re.M)
FILE = re.compile(r"^<!-- file: (\S+) -->$", re.M)
MARKER = re.compile(r"^<!-- results: ([\w-]+) -->$", re.M)

Row = Mapping[str, Any]
Columns = tuple[str | tuple[str, str], ...]
"""Of a table: names in the results, or pairs of a title and one."""


@dataclass(frozen=True)
class Gain:
    """A bar of the picture and a line of the README: one row of a result file."""

    what: str
    setting: str
    file: str
    method: str
    facts: tuple[tuple[str, object], ...] = ()

    @property
    def row(self) -> Row:
        """The row that was measured."""
        wanted = {"method": self.method, **dict(self.facts)}
        for row in read(self.file)["rows"]:
            if all(row.get(key) == value for key, value in wanted.items()):
                return dict(row)
        raise ValueError(f"{self.file}.json must have a row {wanted}: update benchmarks/pages.py")


GREEDY = (("questions", "describe"), ("temperature", 0.0), ("batch", 1))
CODE = (("questions", "code"), ("temperature", 0.0), ("batch", 1))
FLOAT = (("dtype", "float32"),)
WARM = (("temperature", 0.8),)
LANTERN = "lantern++(lambda_=20.0, k=60)"
TEN = "msd(sampled=True, tree=(1, 1, 1, 1, 1, 1, 1, 1, 1, 1))"
GAINS = (
    Gain("pictures, LlamaGen", "`speculative`", "speed", f"speculative(tree={(1,) * 6})", FLOAT),
    Gain("pictures, LlamaGen", "`lantern++`", "speed", LANTERN, FLOAT),
    Gain("pictures, LlamaGen", "`sjd`", "draft_free_speed", "sjd", FLOAT),
    Gain("pictures, Janus", "`sjd`, uncoupled", "words_to_pictures_janus", "sjd", WARM),
    Gain("pictures, MAR", "`cspd`", "mar_compiled", "exact"),
    Gain("pictures, VAR", "`code`, batch 16", "var", "code, N = 5", (("batch", 16),)),
    Gain("answers, LLaVA", "`msd`, chain of 10, greedy", "vlm_speed_llava", TEN, GREEDY),
    Gain("text, Qwen2", "`block`, greedy", "text_speed_coder", "block(length=8)", CODE),
)
CHAIN = "speculative(tree=(1, 1, 1, 1, 1, 1))"
DRAWN = (("temperature", 1.0), *GREEDY[::2])
SAMPLED = (("temperature", 1.0), *CODE[::2])
GRAPH = (("mode", "whole round"), ("batch", 1))
EAGER = (("mode", "eager"), ("batch", 1))
SUMMARIES = {  # of the page of results
    "pictures": (
        Gain("LlamaGen", "`speculative`, chain of 6", "speed", CHAIN, FLOAT),
        Gain("LlamaGen", "`sjd`, no drafter", "speed", "sjd", FLOAT),
        Gain("LlamaGen", "`lantern++`", "speed", LANTERN, FLOAT),
        Gain("LlamaGen", "`eagle`", "speed", "eagle", FLOAT),
        Gain("LlamaGen, both compiled", "`speculative`, chain of 6", "speed_compiled", CHAIN),
        Gain("Janus", "`sjd`, no drafter", "words_to_pictures_janus", "sjd", WARM),
        Gain("Janus", "`gsd`, no drafter", "words_to_pictures_janus", "gsd", WARM),
        Gain("MAR", "`cspd`, exact", "mar", "exact"),
        Gain("MAR", "`cspd`, exact, 9 iterations", "mar", "exact, 9 iterations"),
        Gain("MAR", "`cspd`, the release's", "mar", "release, window 8"),
        Gain("VAR, batch 16", "`code`, 5 of 10 scales", "var", "code, N = 5", (("batch", 16),)),
        Gain("VAR, one picture", "`code`, 5 of 10 scales", "var", "code, N = 5", (("batch", 1),)),
    ),
    "answers": (
        Gain("LLaVA, greedy", "`msd`, chain of 10", "vlm_speed_llava", TEN, GREEDY),
        Gain("LLaVA, T = 1", "`msd`, chain of 10", "vlm_speed_llava", TEN, DRAWN),
        Gain("LLaVA, greedy", "`auto`", "vlm_speed_llava", "auto", GREEDY),
        Gain("LLaVA, T = 1", "`auto`", "vlm_speed_llava", "auto", DRAWN),
        Gain("LLaVA, greedy", "`text-draft`", "vlm_speed_llava", "text-draft", GREEDY),
        Gain("LLaVA, greedy", "`prompt-lookup`", "vlm_speed_llava", "prompt-lookup", GREEDY),
        Gain("LLaVA", "transformers' generate", "vlm_speed_llava", "transformers generate", GREEDY),
    ),
    "text": (
        Gain("Qwen2, greedy", "`block`, 8 drafts", "text_speed_coder", "block(length=8)", CODE),
        Gain("Qwen2, T = 1", "`block`, 8 drafts", "text_speed_coder", "block(length=8)", SAMPLED),
        Gain("Qwen2, greedy", "`prompt-lookup`", "text_speed_coder", "prompt-lookup", CODE),
        Gain("Qwen2, greedy", "`deer`, tree of 8", "text_speed_coder", "deer(tree=8)", CODE),
        Gain("Qwen2, greedy", "`diffuspec`", "text_speed_coder", "diffuspec", CODE),
        Gain("Qwen2", "transformers' generate", "text_speed_coder", "transformers generate", CODE),
    ),
    "gpu": (
        Gain("LlamaGen, graphs", "`speculative`", "gpu/pocket-llamagen", "speculative", GRAPH),
        Gain("Qwen2", "`block`", "gpu/pocket-coder", "block", EAGER),
        Gain("Qwen2", "`prompt-lookup`", "gpu/pocket-coder", "prompt-lookup", EAGER),
        Gain("LLaVA", "`msd`", "gpu/pocket-llava", "msd", EAGER),
        Gain(
            "VAR, graphs, batch 64",
            "`code`, 5 of 10 scales",
            "gpu/pocket-var",
            "code, N = 5",
            (("mode", "graph"), ("batch", 64)),
        ),
        Gain("MAR, graphs", "`cspd`", "gpu/pocket-mar", "cspd", (("mode", "graph"), ("batch", 1))),
    ),
    "quality": (
        Gain("LlamaGen", "`lantern++`", "lantern_quality", LANTERN),
        Gain(
            "LlamaGen",
            "`lantern++`, λ = 40, k = 100, the release's",
            "quality",
            "lantern++(lambda_=40.0, k=100, residual='release')",
        ),
        Gain("MAR", "`cspd`, exact", "mar", "exact"),
        Gain("MAR", "`cspd`, exact, 9 iterations", "mar", "exact, 9 iterations"),
        Gain("MAR", "`cspd`, the release's", "mar", "release, window 8"),
        Gain("VAR", "`code`, 5 of 10 scales", "var", "code, N = 5", (("batch", 16),)),
        Gain("VAR", "`code`, none by the large model", "var", "code, N = 0", (("batch", 16),)),
    ),
}


def read(name: str) -> dict[str, Any]:
    """A result file: its ``rows`` and the ``environment`` they were measured in."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def markdown(head: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    names = list(head)
    rows = [names, ["---"] * len(names), *([str(c) for c in line] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def times(value: float) -> str:
    """A speed-up."""
    return f"{value:.2f}×"


# ---- the README's table and the picture


LOSS = {"FID / plain": "fid_ratio", "KID / plain": "kid_ratio", "TV a token": "tv"}


def gains_table(gains: Iterable[Gain], more: Mapping[str, str] = MappingProxyType({})) -> str:
    """A line for each of ``gains``, with ``more`` columns; those without a value are left out."""
    columns = {"certificate": "certificate", "over plain decoding": "speedup"}
    columns |= {"tokens a round": "tau", **more}
    lines = []
    for gain in gains:
        cells = [_cell(key, gain.row.get(key)) for key in columns.values()]
        file = f"`{gain.file}.csv`, {read(gain.file)['environment']['date'][:10]}"
        lines.append([gain.what, gain.setting, *cells, file])
    filled = [i for i in range(len(lines[0])) if any(line[i] for line in lines)]
    names = ["what", "method", *columns, "measured"]
    return markdown([names[i] for i in filled], [[line[i] for i in filled] for line in lines])


COLOURS = {"exact": "#1a7f5a", "bounded": "#9a6700", "heuristic": "#8250df"}
LEFT, WIDE, HIGH, SCALE = 330, 800, 30, 120


def gain_picture() -> str:
    """The speed-ups of :data:`GAINS` as bars, an SVG that needs no other file."""
    height = HIGH * len(GAINS) + 74
    bars = [_bar(gain, 34 + HIGH * i) for i, gain in enumerate(GAINS)]
    plain = LEFT + SCALE
    line = f'<path d="M{plain} 26V{height - 36}" stroke="#57606a" stroke-dasharray="4 3"/>'
    title = "Speed-up over plain decoding, small trained models, two CPU cores"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="14">',
            f"<title>{title}</title>",
            f'<rect width="{WIDE}" height="{height}" fill="#ffffff"/>',
            f'<text x="{plain}" y="18" text-anchor="middle" fill="#24292f">plain = 1</text>',
            *bars,
            line,
            *_legend(height - 14),
            "</svg>\n",
        )
    )


def _bar(gain: Gain, y: int) -> str:
    row = gain.row
    value, colour = float(row["speedup"]), COLOURS[row["certificate"]]
    label = f"{gain.what}: {gain.setting}".replace("`", "")
    width = SCALE * value
    return (
        f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end" fill="#24292f">{label}</text>'
        f'<rect x="{LEFT}" y="{y}" width="{width:.0f}" height="22" rx="2" fill="{colour}"/>'
        f'<text x="{LEFT + width + 8:.0f}" y="{y + 16}" fill="#24292f">{times(value)}</text>'
    )


def _legend(y: int) -> list[str]:
    said = {
        "exact": "exact (the model's distribution)",
        "bounded": "bounded (deviation measured)",
        "heuristic": "heuristic",
    }
    parts, x = [], 20.0
    for kind, text in said.items():
        parts.append(
            f'<rect x="{x:g}" y="{y - 11}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        )
        parts.append(f'<text x="{x + 18:g}" y="{y}" fill="#24292f">{text}</text>')
        x += 40 + 7.4 * len(text)
    return parts


def updated(readme: str) -> str:
    """The README with its table as the results have it now."""
    before, start, rest = readme.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (start and end):
        raise ValueError(f"README.md must hold {MARKS[0].strip()!r} and {MARKS[1].strip()!r}")
    return before + start + gains_table(GAINS) + end + after


# ---- tables of the pages


@dataclass(frozen=True)
class Table:
    """Columns of one result file, and the rows of it that a page shows."""

    file: str
    columns: Columns
    keep: Callable[[Row], bool] = lambda row: True

    def markdown(self) -> str:
        """The table, and a line that says how it was measured."""
        found = read(self.file)
        rows = [row for row in found["rows"] if self.keep(row)]
        named = [(column, column) if isinstance(column, str) else column for column in self.columns]
        lines = [[_cell(key, row.get(key)) for _, key in named] for row in rows]
        where = found["environment"]
        commit = where.get("git", where.get("commit", "?"))
        machine = where.get("gpu") or where["machine"]
        told = (
            f"`benchmarks/results/{self.file}.csv`: {machine}, {where['cores']} cores, "
            f"load {where.get('load', 0):.0f}, {where['date'][:10]}, commit `{commit}`."
        )
        return markdown([title for title, _ in named], lines) + f"\n\n{told}"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "method":
        return f"`{value}`"
    if key.startswith("speedup"):
        return times(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


SPEED: Columns = (
    "method",
    ("over plain", "speedup"),
    ("lower quartile", "speedup_low"),
    ("upper quartile", "speedup_high"),
)
ROUNDS = (*SPEED, ("tokens a round", "tau"), "certificate")
TOLD = ("temperature", "batch", *ROUNDS)
FIDS = (*SPEED, ("FID / plain", "fid_ratio"), "certificate")
LLAMAGEN = ("dtype", *ROUNDS, ("TV a token", "tv"))
QUALITY = ("method", "samples", *LOSS.items(), "certificate")
OFFICIAL = (
    *("release", "model", "method", "batch", "threads"),
    ("theirs, s", "theirs"),
    ("ours, s", "ours"),
    ("theirs / ours", "speedup"),
    *SPEED[2:],
    ("tau, theirs", "theirs_tau"),
    ("tau, ours", "ours_tau"),
    "repeats",
    ("theirs, MiB", "theirs_mib"),
    ("ours, MiB", "ours_mib"),
    "load",
    ("commit", "git"),
    ("measured", "date"),
)
STARTUP = (
    *("command", ("an import of", "over import of"), "seconds", "of the import", "ratio"),
    *("peak, MB", "of the import, MB", "memory ratio"),
)
SPELLED = ("prompt-lookup", "block", "deer", "text-draft", "diffuspec")
STRUCTURED = (
    *("schema", "whitespace", "example in the prompt", "plain, s"),
    *(column for name in SPELLED for column in (name, f"{name} τ")),
)
DOCTOR = ("model", "head", "spoilt", "named", "forecast", "decoded", "found")
GPU_TRAINING = (
    "model",
    ("rows a step", "batch"),
    ("rows a second", "rows_s"),
    ("the target's share", "target_share"),
    ("peak, GiB", "peak_gib"),
    ("GiB after 20 steps", "gib_at_20"),
    ("after 200", "gib_at_end"),
)
TAUS = ("τ greedy", "τ at T = 1")
DEPTHS = ("depth 1", "depth 2", "depth 3", "depth 4")
LOSSES = ("model", "training", "loss", "steps", *TAUS, *DEPTHS)
TRAINING = ("training", "learning rate", "steps", "rows a second", *TAUS)
WAYS = ("chosen", "one", "two")  # seconds by so many threads
THREADS = ("busy programs", "call", *WAYS, "over the best")
SERVING = (
    *("server", "clients", ("tokens a second", "tokens_per_second")),
    ("processor ms a token", "processor_ms_per_token"),
    ("over transformers serve", "over_theirs"),
    ("over its continuous batching", "over_batched"),
    ("over --method ar", "over_plain"),
    ("first token, s", "first_token_p50"),
    *("answers", ("equal to the pipeline's", "equal")),
)
TABLES = {
    "official": Table("official", OFFICIAL),
    "startup": Table("startup", STARTUP),
    "doctor": Table("doctor", DOCTOR),
    "gpu-training": Table("gpu/training", GPU_TRAINING),
    "losses": Table("losses", LOSSES),
    "training": Table("training", TRAINING),
    "structured": Table("structured", STRUCTURED),
    "threads": Table("threads", THREADS),
    "llamagen": Table("speed", LLAMAGEN, lambda row: row["method"] != "sjd"),
    "llamagen-drafterless": Table("draft_free_speed", LLAMAGEN),
    "llamagen-compiled": Table("speed_compiled", LLAMAGEN),
    "llamagen-quality": Table("quality", QUALITY),
    "lantern-quality": Table("lantern_quality", QUALITY),
    "mar": Table("mar", (*FIDS, ("head calls a token", "head_calls_per_token"))),
    "mar-compiled": Table("mar_compiled", (*SPEED, "certificate")),
    "var": Table("var", ("batch", *FIDS)),
    "llava": Table("vlm_speed_llava", TOLD, lambda row: row["questions"] == "describe"),
    "coder": Table("text_speed_coder", TOLD),
    "coder-compiled": Table("text_speed_coder_compiled", TOLD),
    "smollm2": Table("text_speed_smollm2", (("prompts", "questions"), *TOLD)),
    "serving-coder": Table("serving_coder", SERVING, lambda row: "answers" in row),
    "serving-llava": Table("serving_llava", SERVING),
    "janus": Table("words_to_pictures_janus", TOLD),
}


def zoo_table() -> str:
    """The shipped models, from their cards."""
    lines = []
    for file in sorted(CARDS.glob("*/card.json")):
        card = json.loads(file.read_text())
        name = f"`pocket/{file.parent.name}`"
        lines.append((name, card["description"], card["licence"]))
    return markdown(("model", "what", "licence of the weights"), lines)


def filled(page: str) -> str:
    """A page with its tables, and the files it shows, in place of their markers."""

    def table(found: re.Match[str]) -> str:
        if found[1] == "zoo":
            return zoo_table()
        if found[1] in SUMMARIES:
            return gains_table(SUMMARIES[found[1]], LOSS if found[1] == "quality" else {})
        return TABLES[found[1]].markdown()

    return FILE.sub(_source, MARKER.sub(table, page))


def _source(found: re.Match[str]) -> str:
    return f"```python\n{(ROOT / found[1]).read_text(encoding='utf-8')}```"


# ---- MkDocs' hooks

ADDED = {  # pages that are files of the repository, by where they stand in the site
    "measured.md": "benchmarks/results/README.md",
    "changelog.md": "CHANGELOG.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "packages/kernels.md": "kernels/README.md",
    "packages/metrics.md": "metrics/README.md",
    "packages/drafters.md": "diffusion_drafters/README.md",
    "packages/vlm.md": "vlm/README.md",
    **{f"cards/{f.parent.name}.md": str(f.parent / "README.md") for f in CARDS.glob("*/card.json")},
    **{f.name: str(f) for f in RESULTS.glob("*.png")},
}


def on_startup(**_: Any) -> None:
    """Copy the sources for the API pages, with an ``__init__.py`` in the five folders that have
    none: what reads them finds no module in a folder without one.
    """
    shutil.rmtree(SOURCES, ignore_errors=True)
    for folder, _, names in os.walk(ROOT / "specmm", followlinks=True):
        for name in names:
            _copy(Path(folder, name))


def _copy(file: Path) -> None:
    if file.suffix == ".py":
        copy = SOURCES / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # examples in docstrings are Python, not Markdown's quotations
        copy.write_text(EXAMPLE.sub(_fenced, file.read_text(encoding="utf-8")), encoding="utf-8")
        (copy.parent / "__init__.py").touch()


def _fenced(example: re.Match[str]) -> str:
    indent = " " * (len(example[0]) - len(example[0].lstrip()))
    return f"{indent}```python\n{example[0].replace('>>> ', '')}{indent}```\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the files of :data:`ADDED`."""
    from mkdocs.structure.files import File

    for place, source in ADDED.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(text: str, **_: Any) -> str:
    """Put the tables in."""
    return filled(text)


def main() -> None:
    """Write the README's table and the picture of the gain."""
    PICTURE.write_text(gain_picture())
    README.write_text(updated(README.read_text()))


if __name__ == "__main__":
    main()
