"""Training of an MSD head in two stages, text first.

The head reads the target's states with a little noise and learns the next state (SmoothL1) and the
output head's distribution on it (soft cross-entropy), on the tokens of answers only. States are
computed in each step, not stored. Stage 1 draws text; in stage 2 the share of examples with a
picture rises to 1, epoch by epoch. Sources: MSD (arXiv 2505.14260), EAGLE (2401.15077).

Shape letters: B batch, L positions, M answer slots, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.core.randomness import seeded
from specmm.hf.models.target import VLMTarget
from specmm.recipes.loop import Losses, Run, fit, one_first, share
from specmm.recipes.losses import Head, of_drafts
from specmm.recipes.recipe import Amount, Count, Found, Recipe
from specmm.recipes.settings import Targeted
from specmm.recipes.source import Data, lessons_of
from specmm.recipes.training.seen import Read, Seen, seen_of
from specmm.vlm.msd import MSDConfig, MSDHead, save_msd


def msd(
    *,
    model: str,
    source: Data,
    training: Targeted,
    noise: Amount,
    probs_weight: Amount,
    passes: Count,
    layers: Count,
    ramp: Count | None,
    width: Count | None,
    recipe: Recipe,
) -> Found:
    """Train an MSD drafter in two stages, text first; the result is MODEL/drafters/msd."""
    begun = training.begun(model, "msd", recipe)
    with one_first():
        opened = source.opened(begun.folder, lambda: begun.target, training.out, training.seed)
    if True not in opened.sorts:
        raise ValueError("data must hold pictures or videos for an MSD drafter, got text alone")
    target = begun.target
    lessons = lessons_of(opened, opened.rows(None), training.scenes)
    sizes = {"num_hidden_layers": layers, **({"intermediate_size": width} if width else {})}
    head = build_msd(target, msd_config(target, **sizes), training.seed)
    run = begun.run(lessons, head, head)
    options: dict[str, Any] = dict(noise=noise, probs_weight=probs_weight, passes=passes)
    options |= dict(batch=training.batch, seed=training.seed, ramp=ramp, read=opened.read)
    options |= dict(loss=training.loss)
    train_msd(target, head, opened.draw, run, sorts=opened.sorts, **options)

    def save() -> None:
        begun.accepted(head, lessons)
        save_msd(head, begun.place, dtype=torch.bfloat16, embeddings=False)

    return begun.end(save, run)


PROBS_WEIGHT = 0.1  # the weight of the distributions' loss beside the SmoothL1
MOSTLY = 0.8  # the share of pictures a ramp leads to: with none of it left, text would be forgotten
EPOCHS = 40  # the release's schedule, scaled to the number of steps
BETAS, CLIP, DECAY = (0.9, 0.95), 0.5, 0.01


# Gives the conversation of a number among those with a picture, or among those without one.
Source = Callable[[int, bool], Any]


def build_msd(target: VLMTarget, config: MSDConfig | None = None, seed: int = 0) -> MSDHead:
    """A head for ``target``, with the sizes of the target's layers unless ``config`` gives others;
    token embeddings are the target's, frozen.
    """
    with seeded(seed):
        head = MSDHead(config or msd_config(target)).to(target.device)
    head.embed_tokens.weight.data.copy_(
        target.embed(torch.arange(head.config.vocab_size, device=target.device))
    )
    head.embed_tokens.requires_grad_(False)
    return head


def train_msd(
    target: VLMTarget,
    head: MSDHead,
    source: Source,
    run: Run,
    *,
    read: Read,
    batch: int = 8,
    noise: float = 0.2,
    probs_weight: float = PROBS_WEIGHT,
    passes: int = 1,
    seed: int = 0,
    ramp: int | None = None,
    autocast: bool = True,
    sorts: Sequence[bool] = (False, True),
    loss: str = "kl",
) -> None:
    """Train a ``head`` in place on batches that ``read`` makes of examples of ``source``; ``sorts``
    says whether examples with and without pictures exist.

    With ``ramp`` the share of pictures rises to ``MOSTLY`` over ``ramp`` batches and stays there,
    instead of the release's two stages, which leave few steps for pictures. The noise on the states
    of a row is uniform in ±``noise`` · 256 / its length. ``probs_weight`` is the weight of the
    ``loss``: the release's value suits states of thousands of channels, small targets need more;
    for ``passes`` see ``msd_loss``.
    """
    target.model.requires_grad_(False)
    target.wants_context = True
    batches = run.steps * run.accumulate

    def visual(i: int) -> float:
        if len(sorts) == 1:
            return float(sorts[0])
        return MOSTLY * min(1.0, i / ramp) if ramp else visual_share(i, batches)

    numbered = numbers(visual, batches, batch, seed)

    def step(i: int) -> Losses:
        random = Random(f"msd {seed} {i}")
        examples = [source(*drawn) for drawn in share(numbered[i * batch : (i + 1) * batch])]
        with torch.autocast(target.device.type, torch.bfloat16, enabled=autocast):
            slots = read_slots(target, examples, read, shaking(noise, random.randrange(2**40)))
            return msd_loss(head, target.head, slots, probs_weight, passes, loss)

    fit(head, step, run, betas=BETAS, clip=CLIP, weight_decay=DECAY)
    head.eval()


def numbers(
    share: Callable[[int], float], steps: int, batch: int, seed: int
) -> list[tuple[int, bool]]:
    """For each example of all steps: its number among examples of its sort, and whether it has a
    picture, as a ``share`` of each step's examples do.
    """
    random, counts = Random(f"msd {seed}"), [0, 0]
    rows = []
    for i in range(steps * batch):
        visual = random.random() < share(i // batch)
        rows.append((counts[visual], visual))
        counts[visual] += 1
    return rows


def visual_share(step: int, steps: int, epochs: int = EPOCHS) -> float:
    """Share of pictures at ``step`` of ``steps``: 0 in the first half, (e − 20) / 20 in epoch e."""
    epoch = 1 + step * epochs // steps
    return max(0.0, (epoch - epochs // 2) / (epochs / 2))


def msd_config(target: VLMTarget, **changes: Any) -> MSDConfig:
    """Sizes of a head for ``target``, with the attention heads of its layers if they divide its
    width; ``changes`` replace some sizes.
    """
    config = target.family.config
    vocabulary, width = target.family.head.weight.shape
    heads = getattr(config, "num_attention_heads", None) or 1
    heads = next(n for n in range(heads, 0, -1) if width % (2 * n) == 0)
    groups = getattr(config, "num_key_value_heads", None) or heads
    sizes: dict[str, Any] = dict(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=target.family.inner,
        num_attention_heads=heads,
        num_key_value_heads=next(n for n in range(min(groups, heads), 0, -1) if heads % n == 0),
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        rope_theta=_rope_base(config),
        hidden_act=getattr(config, "hidden_act", None) or "silu",
        qwen=config.model_type.startswith("qwen2"),
    )
    return MSDConfig(**(sizes | changes))


def _rope_base(config: Any) -> float:
    """The base of a decoder's rotary positions; the largest if layers differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
    bases = [getattr(config, "rope_theta", None), *(kind.get("rope_theta") for kind in ropes)]
    return float(max(filter(None, bases), default=10000.0))


def shaking(noise: float, seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that adds noise to states [B, L, C] of rows of ``lengths`` [B]."""

    def shake(hidden: Tensor, lengths: Tensor) -> Tensor:
        unit = torch.rand(hidden.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
        return hidden + unit.to(hidden) * (noise * 512 / lengths[:, None, None]).to(hidden)

    return shake


def read_slots(
    target: VLMTarget,
    examples: Sequence[Any],
    read: Read,
    shake: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Seen:
    """The states of ``target`` on ``examples``, which ``read`` makes into a batch, with noise added
    by ``shake``.

    Raises ``ValueError`` if no draftable token belongs to an answer.
    """
    seen = seen_of(target, *read(examples)).to(target.device)
    if not bool(seen.mask.any()):
        raise ValueError(
            "examples must hold answers after their first token, got none in a batch of "
            f"{len(examples)}"
        )
    assert target.context is not None
    return replace(seen, context=shake(seen.hidden, target.context.lengths)) if shake else seen


def msd_loss(
    head: MSDHead,
    output: Head,
    slots: Seen,
    probs_weight: float = PROBS_WEIGHT,
    passes: int = 1,
    loss: str = "kl",
) -> Losses:
    """SmoothL1 + ``probs_weight`` · the ``loss`` of distributions, mean of ``passes``; and its
    parts.

    ``output`` is the target's head; ``overlap`` is the mean of Σ min(p, q), a single draft's
    probability of acceptance. From the second pass on the head reads its own states on answers, as
    in drafting (and EAGLE-3, arXiv 2503.01840); ``overlap`` is of the first pass, ``overlap_last``
    of the last.
    """
    # Slots that read a state which an answer's slot before them predicts.
    visual = F.pad(slots.mask[:, :-1], (1, 0))
    hidden = slots.context
    drafted = []
    for _ in range(passes):
        states = head(head.prompt_slots(slots.embeddings, hidden, slots.image))
        drafted.append(states[slots.mask].float())
        before = F.pad(states.detach()[:, :-1], (0, 0, 1, 0)).to(hidden)
        hidden = torch.where(visual[..., None], before, hidden)
    target_states = slots.hidden.roll(-1, 1)[slots.mask].float()  # [M, C]
    states = torch.stack(drafted, 1)  # [M, passes, C]
    losses, overlaps = of_drafts(loss, output, output, target_states, states)
    regression = F.smooth_l1_loss(states, target_states[:, None].expand_as(states))
    total = regression + probs_weight * losses.mean()
    overlap = {"overlap": overlaps[0], "overlap_last": overlaps[-1]}
    parts = {"smooth_l1": regression, loss: losses.mean(), **overlap}
    return {"loss": total, **parts, "count": slots.mask.sum()}
