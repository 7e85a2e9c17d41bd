"""Parts shared by all tabs: settings and the race."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from specmm.app.clock import Racer, race, verdict
from specmm.app.lanes import warm_up
from specmm.app.models import MOST_SECONDS, AppModels, local
from specmm.app.trace import Node, drawing_of, table_of
from specmm.methods import AR
from specmm.methods.making import parse_method
from specmm.runs.run import Kind, methods_of

MOST_PARAMETERS = 10
TRACED = 3  # components of a trace
NARROW = 130  # pixels: two columns fit on a phone
ONE: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "models"}
FREE: dict[str, Any] = {"queue": False, "show_progress": "hidden"}
PLAIN: dict[str, Any] = {"format": "png", "buttons": []}  # none that shares a picture
CLOCK = (
    "Both run in turns on one clock, the one that is behind next. Seconds are those of a method's "
    "whole call; previews, loading and a few first rounds do not count. `ar` is plain decoding. "
    "A race of short runs is noisy: the benchmark takes medians."
)


def model_menu(models: AppModels, kind: Kind) -> gr.Dropdown:
    """The menu of a kind's models; any name may be typed if that is allowed."""
    names = models.names[kind]
    return gr.Dropdown(
        names,
        value=names[0],
        label="Model or hub id" if models.anything else "Model",
        allow_custom_value=models.anything,
        visible=models.anything or len(names) > 1,
        min_width=NARROW,
    )


def method_menus(models: AppModels, kind: Kind, name: str) -> tuple[gr.Dropdown, gr.Dropdown]:
    """Menus of the two methods that race; options may be typed: NAME(KEY=VALUE, …)."""
    names = models.methods(kind, name)
    common: dict[str, Any] = {"allow_custom_value": True, "min_width": NARROW}
    plain = gr.Dropdown(names, value=str(AR.name), label="First method", **common)
    usual = models.start(kind, name).method
    return plain, gr.Dropdown(names, value=usual, label="Second method", **common)


def parameter_boxes(defaults: Mapping[str, Any]) -> list[Any]:
    """Text boxes for a model's parameters; unneeded boxes are hidden."""
    boxes = []
    for i in range(MOST_PARAMETERS):
        name = list(defaults)[i] if i < len(defaults) else ""
        value = "" if defaults.get(name) is None else str(defaults[name])
        boxes.append(
            gr.Textbox(label=name or "none", value=value, visible=bool(name), min_width=NARROW)
        )
    return boxes


def method_of(models: AppModels, kind: Kind, model: str, text: str) -> Any:
    """The one method that ``text`` names for a model, with its options."""
    return parse_method(methods_of(kind, local(model)), text)


def raced(
    models: AppModels, keys: Sequence[Any], make: Sequence[Callable[[], Racer]]
) -> Iterator[list[Any]]:
    """Yields the lanes that ``make`` creates whenever they should be shown, finally when both have
    ended.

    A lane with a new key first runs a few rounds, so that loading and planning do not count.
    """
    for key, each in zip(keys, make, strict=True):
        if key not in models.warmed:
            warm_up(each())
            models.warmed.add(key)
    lanes: list[Any] = []
    try:
        for each in make:
            lanes.append(each())
        for _ in race(lanes, MOST_SECONDS):
            yield lanes
    finally:
        for lane in lanes:
            lane.close()


def result(names: Sequence[str], lanes: Sequence[Any]) -> str:
    """The line above both sides."""
    if any(lane.out is None for lane in lanes):
        return f'<p class="verdict">Racing … {lanes[0].clock.seconds:.1f} s each</p>'
    verdict_line = verdict(names, [lane.clock.seconds for lane in lanes])
    return f'<p class="verdict" role="status"><b>{verdict_line}</b></p>'


def told(
    names: Sequence[str],
    race: Iterator[list[Any]],
    side: Callable[[Any, str], list[Any]],
    called: Callable[[int], str],
) -> Iterator[list[Any]]:
    """Updates of verdict, both sides and trace during a ``race``. ``side`` makes the components of
    a side from a lane and its name; ``called`` gives a token's text.
    """
    for lanes in race:
        sides = [part for lane, name in zip(lanes, names, strict=True) for part in side(lane, name)]
        trace = [gr.skip()] * TRACED
        if all(lane.out is not None for lane in lanes):
            trace = TraceView.updates(Trace.of(names, lanes, called))
        yield [result(names, lanes), *sides, *trace]


@dataclass
class Trace:
    """The rounds of a run as shown to people, with the texts of its tokens."""

    method: str = ""
    rounds: list[list[Node]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(names: Sequence[str], lanes: Sequence[Any], called: Callable[[int], str]) -> Trace:
        """The trace of the last lane that drafted trees."""
        drafted = [i for i, lane in enumerate(lanes) if lane.watch.rounds]
        if not drafted:
            return Trace()
        rounds = lanes[drafted[-1]].watch.rounds
        tokens = {node.token for nodes in rounds for node in nodes}
        return Trace(names[drafted[-1]], rounds, {token: called(token) for token in tokens})

    @property
    def longest(self) -> int:
        """The number, from 1, of the longest accepted round, if possible with a rejected draft."""
        lengths = [sum(node.kept for node in nodes) for nodes in self.rounds]
        mixed = [
            sum(n.kept for n in nodes) * (not all(n.kept for n in nodes)) for nodes in self.rounds
        ]
        best = mixed if any(mixed) else lengths
        return best.index(max(best)) + 1

    def shown(self, number: float) -> str:
        """Drawing and table of a round."""
        nodes = self.rounds[min(int(number), len(self.rounds)) - 1]
        named = self.names.__getitem__
        return drawing_of(nodes, named) + table_of(nodes, named)


class TraceView:
    """An accordion with one round of the last race."""

    def __init__(self) -> None:
        with gr.Accordion("One round: tree, kept path, probabilities", open=False):
            self.state = gr.State(Trace())
            self.number = gr.Slider(1, 2, 1, step=1, label="Round", interactive=True)
            self.drawing = gr.HTML("<p>Race two methods first.</p>")
        self.number.change(self._show, [self.state, self.number], self.drawing, **FREE)

    @property
    def components(self) -> list[Any]:
        """The components that ``updates`` refers to."""
        return [self.state, self.number, self.drawing]

    @staticmethod
    def _show(trace: Trace, number: float) -> str:
        return trace.shown(number) if trace.rounds else "<p>No tree was drafted.</p>"

    @classmethod
    def updates(cls, trace: Trace) -> list[Any]:
        """Values of the components: the round with most accepted drafts."""
        if not trace.rounds:
            return [trace, gr.Slider(1, 2, value=1), cls._show(trace, 1)]
        count = max(len(trace.rounds), 2)
        label = f"Round of {trace.method}, 1 to {len(trace.rounds)}"
        number = gr.Slider(1, count, value=trace.longest, label=label)
        return [trace, number, trace.shown(trace.longest)]
