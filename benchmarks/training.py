"""Training of an EAGLE-3 head for pocket/coder beside speculators' own, of the same sizes.

    OMP_NUM_THREADS=1 python -m benchmarks.training --speculators FOLDER

FOLDER holds the release's package (``pip download speculators``, unpacked), which is run, not
copied. Both learn from the same rows in the same order, with the target's states at hand, the same
number of steps, and with what each has by default: first weights, optimisers, schedule, clipping,
loss and drafts in a row (theirs Muon at 1e-3 that falls linearly after 1% of the steps, a frozen
output head, KL, three drafts; ours as the recipe ``eagle3`` says). Theirs is trained at our
learning rate, too. Steps are timed in turn, in one process and one thread. Then all heads draft for
the same held-out texts, greedy and at temperature 1.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers import get_linear_schedule_with_warmup

from benchmarks.common import RESULTS, Out, Row, environment, write_results
from specmm.core.decode import EndTokens, decode
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms, seeded
from specmm.core.stats import Stats
from specmm.core.tree import TreeShape
from specmm.hf.drafters.eagle3_head import Eagle3Head
from specmm.hf.drafters.features import FeatureDrafter
from specmm.hf.loading.pretrained import load_target
from specmm.hf.models.aux_states import AuxStates
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.recipes.features import CLIP, RolledEagle3, build_eagle3, head_rate, rollout_loss
from specmm.recipes.loop import MUON, Losses, Run, batch_rows, fit
from specmm.recipes.recipe import load
from specmm.recipes.settings import WARMUP
from specmm.recipes.training.seen import Seen
from specmm.recipes.training.texts import text_stream, windows
from specmm.text.pipeline import TextPipeline
from specmm.verify import Recursive
from specmm.zoo import POCKET

LENGTH, BATCH, DEPTH = 256, 8, 5
RATE = 1e-3  # theirs
HELD, PROMPT, ANSWER = 96, 64, 80


class Data:
    """Rows of code with the target's states."""

    def __init__(self, target: VLMTarget, rows: torch.Tensor, layers: tuple[int, ...]) -> None:
        self.target, self.rows = target, rows
        aux = AuxStates([target.family.layers[i] for i in layers])
        with torch.inference_mode():
            found = [
                (target.family.decoder(input_ids=part).last_hidden_state, aux.context())
                for part in rows.split(16)
            ]
        hidden, context = (torch.cat(parts) for parts in zip(*found, strict=True))
        self.hidden, self.context = hidden.clone(), context.clone()

    def seen(self, step: int) -> Seen:
        """A batch as our head learns it."""
        rows = batch_rows(step, BATCH, len(self.rows), 0)
        tokens = self.rows[rows]
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, -1] = False
        with torch.no_grad():
            following = self.target.embed(tokens.roll(-1, 1))
        return Seen(following, self.context[rows], self.hidden[rows], mask, tokens, tokens < 0)

    def packed(self, step: int) -> dict[str, Any]:
        """The same batch as theirs learns it: one row of all, shifted by a token."""
        rows = batch_rows(step, BATCH, len(self.rows), 0)
        tokens = self.rows[rows]
        count = LENGTH - 1
        document = torch.arange(len(rows)).repeat_interleave(count)[None]
        return {
            "hidden_states": self.context[rows, :-1].flatten(0, 1)[None],
            "input_ids": tokens[:, 1:].flatten()[None],
            "document_ids": document,
            "loss_mask": torch.ones(1, len(rows) * count, dtype=torch.bool),
            "position_ids": torch.arange(1, count + 1).repeat(len(rows))[None],
            "verifier_last_hidden_states": self.hidden[rows, 1:].flatten(0, 1)[None],
        }


class Theirs:
    """speculators' model of the sizes of ``head``, and its training at a learning ``rate``."""

    def __init__(
        self, folder: Path, target: VLMTarget, head: Eagle3Head, rate: float, steps: int
    ) -> None:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        theirs = importlib.import_module
        sizes: Any = head.config.sizes
        sizes._attn_implementation = "sdpa"
        config = theirs("speculators.config")
        verifier = config.VerifierConfig(name_or_path=None, architectures=["Qwen2ForCausalLM"])
        proposal = theirs("speculators.proposals.greedy").GreedyTokenProposalConfig
        made = theirs("speculators.models.eagle3").Eagle3SpeculatorConfig(
            transformer_layer_config=sizes,
            draft_vocab_size=head.config.tokens,
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=[i + 1 for i in head.config.layers],
            speculators_config=config.SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[proposal(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=verifier,
            ),
        )
        with seeded(0):
            self.model = theirs("speculators.models.eagle3.core").Eagle3DraftModel(made).train()
        self.model.load_state_dict({"d2t": head.d2t, "t2d": head.t2d}, strict=False)
        self.model.verifier_norm = nn.Identity()  # the states at hand are normed
        rows = target.family.head.weight.detach()
        rows = rows if head.ids is None else rows[head.ids]
        embedded = target.embed(torch.arange(int(sizes.vocab_size)))
        read = {"lm_head": rows, "verifier_lm_head": rows, "embed_tokens": embedded}
        for name, weight in read.items():  # as it reads them of a verifier's files
            getattr(self.model, name).weight.data.copy_(weight)
            getattr(self.model, name).weight.requires_grad_(False)
        self.loss = theirs("speculators.losses").resolve_loss_config("kl_div", "eager")
        options = theirs("speculators.train.config.schema").OptimizerArgs(lr=rate, muon_lr=rate)
        build = theirs("speculators.train.optimizers").build_optimizers
        self.optimizers = build(self.model, options)
        self.schedules = [
            get_linear_schedule_with_warmup(each, steps // 100, steps) for each in self.optimizers
        ]
        self.seconds: list[float] = []

    def step(self, given: dict[str, Any]) -> None:
        """One, timed, as its trainer does it."""
        begun = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = self.model(**given, ttt_steps=3, loss_config=self.loss)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for each in (*self.optimizers, *self.schedules):
            each.step()
        self.seconds.append(time.perf_counter() - begun)

    def head(self, like: Eagle3Head) -> Eagle3Head:
        """What it has learnt, as a head of ours."""
        found = copy.deepcopy(like)
        own = {k: v for k, v in self.model.state_dict().items() if k in like.state_dict()}
        missing, _ = found.load_state_dict(own, strict=False)
        assert not missing, missing
        return found.eval()


def main(
    speculators: Annotated[Path, typer.Option(help="The release's package, unpacked.")],
    steps: Annotated[int, typer.Option(min=20)] = 240,
    rows: Annotated[int, typer.Option(min=8)] = 1536,
    out: Out = RESULTS,
) -> None:
    """Train all, time their steps, and let them draft."""
    network, words = load_target(POCKET / "coder", torch.float32)
    target = VLMTarget(network.requires_grad_(False), Processor(0.0))
    with TemporaryDirectory() as folder:
        stream = text_stream(words, Path(folder))
        held = windows(text_stream(words, Path(folder), held_out=True), 0, HELD, PROMPT, 0)
    tokens = windows(stream, 0, rows, LENGTH, 0)
    ids = torch.bincount(tokens.flatten(), minlength=target.family.vocabulary).topk(1024).indices
    head = build_eagle3(target, 1, 0, ids)
    data = Data(target, tokens, head.config.layers)
    settings = load("eagle3").settings
    rate, rollout = head_rate(head), int(settings["rollout"])
    rates = {"speculators": RATE, "speculators at our rate": rate}
    others = {name: Theirs(speculators, target, head, r, steps) for name, r in rates.items()}
    rolled, output = RolledEagle3(head), target.family.logits_of(head.ids)
    marks: list[tuple[float, float]] = []  # when ours begins, and when it is done

    def step(i: int) -> Losses:
        done = time.perf_counter()
        for each in others.values():
            each.step(data.packed(i))
        marks.append((time.perf_counter(), done))
        with torch.autocast("cpu", torch.bfloat16):
            return rollout_loss(rolled, output, data.seen(i), rollout, loss=settings["loss"])

    with TemporaryDirectory() as folder:
        run = Run(Path(folder), steps, rate, min(WARMUP, steps // 10), save_every=1e9)
        fit(head, step, run, clip=CLIP, muon=MUON * rate)
    own = [after - begun for (begun, _), (_, after) in pairwise(marks)]
    heads = {"specmm": (rate, own, head.eval())}
    heads |= {name: (rates[name], x.seconds, x.head(head)) for name, x in others.items()}
    prompt, ends = VLMPrompt(padded(held.tolist()), ANSWER), TextPipeline(network, words).ends()
    found: list[Row] = []
    for name, (lr, seconds, each) in heads.items():
        taus = [drafted(network, each, prompt, ends, t).tau for t in (0.0, 1.0)]
        speed = round(BATCH / statistics.median(seconds[5:]), 2)
        row: Row = {"training": name, "learning rate": lr, "steps": steps, "rows a second": speed}
        found.append(row | {"τ greedy": round(taus[0], 3), "τ at T = 1": round(taus[1], 3)})
        print(found[-1], flush=True)
    write_results(out, "training", found, environment(rows=rows))


@torch.inference_mode()
def drafted(
    network: Any, head: Any, prompt: VLMPrompt, ends: Sequence[int], temperature: float
) -> Stats:
    """What decoding with chains of five drafts of a ``head`` does after a ``prompt``."""
    target = VLMTarget(network, Processor(temperature))
    drafter = FeatureDrafter(head, target, TreeShape.chain(DEPTH))
    uniforms = Uniforms.from_seeds(range(len(prompt.lengths)))
    length, stop = prompt.max_new_tokens, EndTokens(ends)
    *_, end = decode(target, drafter, Recursive(), prompt, length, uniforms, stop=stop)
    return end.stats


if __name__ == "__main__":
    typer.run(main)
