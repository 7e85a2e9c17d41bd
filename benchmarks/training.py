"""Training of an EAGLE-3 head for pocket/coder beside speculators' own, of the same sizes.

    OMP_NUM_THREADS=1 python -m benchmarks.training --speculators FOLDER

FOLDER holds the release's package (``pip download speculators``, unpacked), which is run, not
copied. Both learn from the same rows, with the target's states at hand, by steps of the same size
and number, with what each does by default (theirs AdamW, KL, three steps of test-time training;
ours AdamW and Muon, four drafts in a row). Steps are timed in turn, in one process and one thread.
Then both heads draft for the same held-out texts, greedy and at temperature 1.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks.common import RESULTS, Out, Row, environment, write_results
from specmm.decode import EndTokens, decode
from specmm.hf.aux_states import AuxStates
from specmm.hf.drafters.eagle3_files import load_eagle3, save_eagle3
from specmm.hf.drafters.eagle3_head import Eagle3Head
from specmm.hf.drafters.features import FeatureDrafter
from specmm.hf.pretrained import load_target
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.randomness import Uniforms
from specmm.recipes.features import RolledEagle3, build_eagle3, rollout_loss
from specmm.recipes.training.seen import Seen
from specmm.recipes.training.texts import text_stream, windows
from specmm.text.pipeline import TextPipeline
from specmm.training import MUON, Losses, Run, batch_rows, fit, warmup_cosine
from specmm.tree import TreeShape
from specmm.verify import Recursive
from specmm.zoo import POCKET

LENGTH, BATCH, RATE, DEPTH = 256, 8, 1e-3, 5
HELD, PROMPT, ANSWER = 24, 64, 80


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
        return Seen(following, self.context[rows], self.hidden[rows], mask, tokens)

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


def theirs(folder: Path, target: VLMTarget, head: Eagle3Head) -> Any:
    """speculators' model of the sizes and first weights of ``head``."""
    sys.path.insert(0, str(folder))
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    sizes: Any = head.config.sizes
    sizes._attn_implementation = "sdpa"
    verifier = VerifierConfig(name_or_path=None, architectures=["Qwen2ForCausalLM"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=sizes,
        draft_vocab_size=head.config.tokens,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[i + 1 for i in head.config.layers],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )
    made = Eagle3DraftModel(config)
    own = {k: v for k, v in head.state_dict().items() if k in made.state_dict()}
    made.load_state_dict(own, strict=False)
    made.embed_tokens.weight.data.copy_(target.embed(torch.arange(int(sizes.vocab_size))))
    made.embed_tokens.weight.requires_grad_(False)
    made.verifier_norm = nn.Identity()  # the states at hand are normed
    rows = target.family.head.weight.detach()
    made.verifier_lm_head.weight.data.copy_(rows if head.ids is None else rows[head.ids])
    made.verifier_lm_head.weight.requires_grad_(False)
    return made.train()


def main(
    speculators: Annotated[Path, typer.Option(help="The release's package, unpacked.")],
    steps: Annotated[int, typer.Option(min=20)] = 400,
    rows: Annotated[int, typer.Option(min=8)] = 384,
    out: Out = RESULTS,
) -> None:
    """Train both, time their steps, and let both draft."""
    network, words = load_target(POCKET / "coder", torch.float32)
    target = VLMTarget(network.requires_grad_(False), Processor(0.0))
    with TemporaryDirectory() as folder:
        stream = text_stream(words, Path(folder))
        held = windows(text_stream(words, Path(folder), held_out=True), 0, HELD, PROMPT, 0)
    tokens = windows(stream, 0, rows, LENGTH, 0)
    ids = torch.bincount(tokens.flatten(), minlength=target.family.vocabulary).topk(1024).indices
    head = build_eagle3(target, 1, 0, ids)
    data = Data(target, tokens, head.config.layers)
    other = theirs(speculators, target, head)
    spent: dict[str, list[float]] = {"specmm": [], "speculators": []}
    rolled, output = RolledEagle3(head), target.family.logits_of(head.ids)
    kl = importlib.import_module("speculators.losses").resolve_loss_config("kl_div", "eager")
    trained = [p for p in other.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=RATE)

    def their_step(i: int) -> None:
        for group in adamw.param_groups:
            group["lr"] = RATE * warmup_cosine(i, steps)
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = other(**data.packed(i), ttt_steps=3, loss_config=kl)
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        adamw.step()

    def step(i: int) -> Losses:
        begun = time.perf_counter()
        their_step(i)
        now = time.perf_counter()
        spent["speculators"].append(now - begun)
        if i:
            spent["specmm"].append(begun - marks[-1])
        marks.append(now)
        with torch.autocast("cpu", torch.bfloat16):
            return rollout_loss(rolled, output, data.seen(i), 4)

    marks: list[float] = []
    with TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run", steps, RATE, save_every=1e9)
        fit(head, step, run, clip=0.5, muon=MUON * RATE)
        own = Path(folder) / "speculators"
        state = head.state_dict() | {
            k: v for k, v in other.state_dict().items() if k in head.state_dict()
        }
        second = build_eagle3(target, 1, 0, ids)
        second.load_state_dict(state)
        save_eagle3(second, own, network)
        second = load_eagle3(own).float()
    ends = TextPipeline(network, words).ends()
    found: list[Row] = []
    for name, each in (("specmm", head.eval()), ("speculators", second.eval())):
        taus = {t: tau(network, each, held, ends, t) for t in (0.0, 1.0)}
        rate = BATCH / statistics.median(spent[name][5:])
        row: Row = {"training": name, "steps": steps, "rows a second": round(rate, 2)}
        found.append(row | {"τ greedy": round(taus[0.0], 3), "τ at T = 1": round(taus[1.0], 3)})
        print(found[-1])
    write_results(out, "training", found, environment(rows=rows))


@torch.inference_mode()
def tau(network: Any, head: Eagle3Head, held: Any, ends: list[int], temperature: float) -> float:
    """Tokens a round of chains of five drafts after the ``held`` texts."""
    target = VLMTarget(network, Processor(temperature))
    drafter = FeatureDrafter(head, target, TreeShape.chain(DEPTH))
    prompt = VLMPrompt(padded(held.tolist()), ANSWER)
    uniforms = Uniforms.from_seeds(range(len(held)))
    stop = EndTokens(ends)
    *_, end = decode(target, drafter, Recursive(), prompt, ANSWER, uniforms, stop=stop)
    return float(end.stats.tau)


if __name__ == "__main__":
    typer.run(main)
