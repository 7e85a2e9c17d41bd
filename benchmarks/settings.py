"""The options of a run, which are those of its command, and which methods it measures."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.common import (
    CACHE,
    EMOJI,
    RESULTS,
    CacheFolder,
    DataFolder,
    Out,
    Threads,
    parse,
    playable,
)
from specmm import methods
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.loading.hardware import named_dtype
from specmm.methods import Method

CHAIN = methods.Speculative(tree=(1, 1, 1, 1, 1, 1))
CONTENDERS: dict[str, tuple[Method, ...]] = {  # by results, unless --methods says otherwise
    "speed": (
        methods.AR(),
        methods.Speculative(),
        CHAIN,
        methods.Speculative(rule="recursive"),
        methods.Speculative(rejected_weight=0.0),
        methods.Speculative(drafter="eagle"),
        methods.LanternPP(),
        methods.LanternPP(rejected_weight=0.0),
        methods.LanternPP(residual="release"),
        methods.LanternPP(lambda_=3.0, k=10),
        methods.LanternPP(lambda_=10.0, k=40),
        methods.LanternPP(lambda_=40.0, k=100),
        methods.Eagle(),
        methods.Lantern(),
        methods.Lantern(drafter="block"),
        methods.SJD(),
    ),
    "draft_free_speed": (
        methods.AR(),
        *(
            methods.SJD(window=window, init=init, coupled=coupled)
            for coupled in (True, False)
            for window in (8, 11, 15)
            for init in ("last", "above")
        ),
        methods.SJD(init="left"),
        methods.SJD(rule="block", coupled=False),
        CHAIN,  # beside them: the trained drafter's
    ),
    "quality": (
        methods.AR(),
        methods.LanternPP(),
        methods.LanternPP(lambda_=40.0, k=100),
        methods.LanternPP(lambda_=10.0, k=40),
        methods.Speculative(),
    ),
}


Part = Literal["speed", "draft-free", "acceptance", "quality", "report", "all"]


@dataclass
class Options:
    """Measure pictures of tokens, and write the report."""

    part: Annotated[Part, typer.Argument()] = "all"
    model: str = "pocket/llamagen"
    out: Out = RESULTS
    cache: CacheFolder = CACHE
    data: DataFolder = EMOJI
    minutes: Annotated[
        float | None, typer.Option("--budget-minutes", help="Each part's; quality resumes later.")
    ] = None
    threads: Threads = 2
    dtype: Annotated[
        torch.dtype | None, typer.Option(parser=named_dtype, help="The pipeline's by default.")
    ] = None
    methods: Annotated[
        list[Any], typer.Option(parser=parse, help='As ar or "lantern++(lambda_=3.0, k=10)".')
    ] = ()
    repeats: Annotated[int, typer.Option(help="Of speed: pictures a method.")] = 24
    compile: Annotated[bool, typer.Option("--compile", help="Of speed: all that can be.")] = False
    samples: Annotated[int, typer.Option(help="Of quality, a method.")] = 2000
    batch: Annotated[int, typer.Option(help="Of quality: pictures at a time.")] = 64
    network: Annotated[
        str, typer.Option(help="Of quality: whose features, as of specmm eval fd.")
    ] = "inception"
    pictures: Annotated[int, typer.Option(help="Of acceptance, a rule.")] = 48
    budgets: Annotated[list[int], typer.Option(help="Of acceptance: drafts a round.")] = (8, 16, 26)

    def contenders(self, pipe: LlamaGenPipeline, results: str) -> list[Method]:
        """The chosen methods, else those of ``results``, if the model has a drafter for them."""
        return playable(pipe, self.methods or CONTENDERS[results])
