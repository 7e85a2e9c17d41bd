"""Block and EAGLE drafters of a LlamaGen (``drafter``), written to the model's ``drafters/``, and
the acceptance that ``auto`` plans trees from. They learn from states computed in each step: no
feature files.

Shape letters: M pictures, B batch, T tokens of a picture, A anchors a picture, K levels, N places,
C width, F layers read, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from specmm import zoo
from specmm.choose.acceptance import WIDEST, AcceptanceCounter
from specmm.core.decode import decode
from specmm.core.derived import digest
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms, seeded
from specmm.extending.registry import unknown
from specmm.image_ar.files import read_settings, write_settings
from specmm.image_ar.pipeline import picture_type
from specmm.image_ar.tokens.assemble import PictureParts, assemble
from specmm.image_ar.tokens.choosing import JACOBI
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockDrafter, BlockHead
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import Transformer
from specmm.image_ar.tokens.loading import load_block, load_gpt, load_vq, save_drafters
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline, LlamaGenSettings
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.loading.files import writable
from specmm.recipes.loop import Losses, Run, batch_rows, check_same, fit, kept, one_first, share
from specmm.recipes.losses import Head, check_loss, compared
from specmm.recipes.pictures import CLASS_DROPOUT, encode_views
from specmm.recipes.recipe import Amount, Count, Found, Open, Recipe, Seed, Size, beside
from specmm.recipes.settings import facts_of
from specmm.recipes.source import key_of
from specmm.recipes.training.drawn_rows import made_by
from specmm.shape.trees import spine
from specmm.verify import Recursive

KINDS = ("block", "eagle")
LR = {"block": 1e-3, "eagle": 1e-4}
AT_ONCE = 96  # pictures that the target draws


def drafter(
    *,
    model: str,
    kind: str,
    data: Open,
    steps: Count,
    batch: Count,
    seed: Seed,
    levels: Count,
    layers: Count,
    aux_layers: str,
    inner: Size,
    overlap_weight: Amount,
    temperature: Annotated[float, 0.01],
    noise: Amount,
    lr: float | None,
    loss: str,
    drawn: Size,
    cfg: float | None,
    start: Path | None,
    replace: bool,
    out: Path | None,
    recipe: Recipe,
) -> Found:
    """Train a drafter for a model; the result is MODEL/drafters/KIND."""
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    check_loss(loss)
    source, result = drafter_folders(model, kind, replace)
    folder = writable(out or Path("runs") / kind)
    facts = facts_of(recipe)
    check_same(folder, facts)
    if kind != "block" and start is not None:
        raise ValueError(f"start goes with kind=block, got {kind}; leave it out")
    with one_first():
        target, tokens, labels = _examples(source, data, folder, drawn, cfg, seed)
    read = _layers(aux_layers, target.config.n_layer)
    sizes: dict[str, Any] = dict(levels=levels, layers=layers, aux_layers=read, inner=inner)
    begun = None if start is None else load_block(start, target)
    if begun is not None:
        sizes = vars(begun.config) | ({"inner": inner} if inner else {})
        sizes["levels"] = max(levels, begun.config.levels)
    facts |= {"pictures learnt": key_of(x.numpy().tobytes() for x in (tokens, labels))}
    facts |= {"target": digest(target)}
    run = Run(folder, steps, lr or LR[kind], batch=batch, made_of=facts)
    options: dict[str, Any] = dict(batch=batch, seed=seed, loss=loss)
    head: Any
    if kind == "eagle":
        options |= dict(noise=noise, ffn_dim=inner or None)
        head = train_eagle(target, tokens, labels, run, **options)
    else:
        guided = (read_settings(LlamaGenSettings, source).cfg if cfg is None else cfg) > 1
        # where the model is guided both branches draft: more than its own share has no class
        options |= dict(dropout=3 * CLASS_DROPOUT if guided else 0.0, start=begun)
        options |= dict(overlap_weight=overlap_weight, temperature=temperature)
        config = BlockConfig(**sizes | {"target": target.config})
        head = train_block(target, tokens, labels, config, run, **options)
    with one_first() as first:
        if first:
            save_drafters({kind: head}, result.parent, target, torch.bfloat16)
            if kind == "block":
                _note_acceptance(source, target, head)
    return {"kind": kind, "model": model, "steps": steps, "outputs": [str(result)]}


def drafter_folders(model: str, kind: str, replace: bool) -> tuple[Path, Path]:
    """The folder of a picture ``model``, and the writable folder of its drafter ``kind``; raises
    ``ValueError`` if the latter exists and ``replace`` is off.
    """
    folder = zoo.pocket_models().get(model, Path(model))
    if picture_type(folder) is not None:
        raise ValueError(
            f"drafters are trained for LlamaGens, got {model}, a picture model of transformers: "
            "sjd and gsd need none"
        )
    source = zoo.find(model, zoo.PIPELINE)
    result = beside(model, source) / "drafters" / kind
    if result.exists() and not replace:
        raise ValueError(f"{result} exists already; give --set replace=true to replace it")
    writable(result.parent)
    return source, result


def _layers(text: str, count: int) -> tuple[int, ...]:
    """The layers in ``text``, such as "4,9,14"; ``ValueError`` for layers beyond ``count``."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) < count for part in names):
        raise ValueError(
            f"aux_layers must be layers from 0 to {count - 1} with commas between, got {text!r}"
        )
    return tuple(map(int, names))


def _examples(
    model: Path, data: Open, out: Path, count: int, cfg: float | None, seed: int
) -> tuple[Any, Any, Any]:
    """The target, tokens [M, 2, T] and labels [M]: from the data, if any, followed by ``count``
    pictures that the target draws.
    """
    target, vq = load_gpt(model / "transformer"), load_vq(model / "vq")
    side = round(target.config.block_size**0.5) * vq.config.downsampling
    pictures = data(read_settings(LlamaGenSettings, model).classes, target.config.num_classes, side)
    labels = torch.from_numpy(pictures.labels)
    if pictures.images is None and not count:
        raise ValueError(
            "a drafter needs pictures to learn from: give --set data=FOLDER or --set drawn=N"
        )
    parts = []
    if pictures.images is not None:
        parts.append((picture_tokens(vq, pictures.images, out), labels))
    if count:
        rows = torch.randint(len(labels), (count,), generator=torch.Generator().manual_seed(seed))
        drawn = _draw(model, target, vq, labels[rows], out / "drawn", cfg, seed)
        parts.append((drawn[:, None].repeat(1, 2, 1), labels[rows]))
    tokens, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return target, tokens, labels


def _draw(
    model: Path, target: Any, vq: Any, labels: Any, out: Path, cfg: float | None, seed: int
) -> Any:
    """Tokens [N, T] that the target draws for ``labels`` [N] by plain decoding, stored in ``out``
    batch by batch, so that an interrupted run continues.
    """
    settings = read_settings(LlamaGenSettings, model)
    pipe = LlamaGenPipeline(target, vq, {}, settings)
    pipe.set_progress_bar_config(disable=True)
    options = [settings.cfg, settings.cfg_interval, settings.temperature]
    options += [settings.top_k, settings.top_p]
    cache = out / made_by(target, labels.tolist(), cfg, seed, options)

    def drawn(i: int, part: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1_000_003 * seed + i)
        options: dict[str, Any] = dict(batch_size=len(part), output_type="latent", cfg=cfg)
        tokens: Tensor = pipe(part.tolist(), generator=generator, **options).tokens
        return tokens

    parts = enumerate(tqdm(labels.split(AT_ONCE), desc="draw"))
    return torch.cat([kept(cache / f"{i:04d}.pt", partial(drawn, i, part)) for i, part in parts])


def _note_acceptance(model: Path, target: Any, head: Any, pictures: int = 32) -> None:
    """Measure the acceptance by level and rank under the model's sampling, and the tau of methods
    without a drafter, and write both where method auto reads them.
    """
    settings = read_settings(LlamaGenSettings, model)
    processor = Processor(settings.temperature, settings.top_k, settings.top_p)
    judge = LlamaGenTarget(target, Guidance(settings.cfg, settings.cfg_interval), processor)
    prompt = Prompt(torch.arange(pictures) % target.config.num_classes)
    table = measure_acceptance(head, judge, prompt, range(pictures))
    taus = dict(settings.taus)
    for name, method in JACOBI.items():
        bound, drafter, rule = assemble(method, judge, PictureParts())
        uniforms = Uniforms.from_seeds(range(pictures), bound.device)
        *_, end = decode(bound, drafter, rule, prompt, bound.length, uniforms)
        taus[name] = round(end.stats.tau, 4)
    write_settings(dataclasses.replace(settings, acceptance=table, taus=taus), model)


def picture_tokens(vq: Any, images: Any, out: Path) -> Any:
    """Tokens [M, 2, T] of the pictures and their mirror images, stored in ``out``."""

    def encode() -> Any:
        return encode_views(lambda x: vq.encode(x).indices.flatten(1), torch.from_numpy(images))

    return kept_tokens(vq, images, out / "tokens.pt", encode)


def kept_tokens(vq: Any, images: Any, file: Path, encode: Callable[[], Any]) -> Any:
    """The tokens that ``encode`` makes of ``images`` (an array) with the tokenizer ``vq``, stored
    in ``file`` and reused while both stay the same.
    """
    weights = b"".join(v.detach().float().numpy().tobytes() for v in vq.state_dict().values())
    vq.eval()
    return kept(file, encode, hashlib.sha256(weights + images.tobytes()).hexdigest())


@dataclass(frozen=True)
class Seen:
    """The target's states on pictures: their ``tokens`` [B, T], the tokens' ``logits`` [B, T, V],
    the ``hidden`` states [B, T, C · (1 + F)] before them, and their ``embedded`` inputs [B, T, C].
    """

    tokens: Tensor
    logits: Tensor
    hidden: Tensor
    embedded: Tensor


@torch.no_grad()
def seen_by(target: Transformer, labels: Tensor, tokens: Tensor, aux_layers: Sequence[int]) -> Seen:
    """A LlamaGen's states on ``tokens`` [B, T] of ``labels`` [B]."""
    # position i predicts token i
    logits, hidden = target(target.embed(labels, tokens[:, :-1]), aux_layers=aux_layers)
    return Seen(tokens, logits, hidden, target.tok_embeddings(tokens))


def train_block(
    target: Transformer,
    tokens: Tensor,
    labels: Tensor,
    config: BlockConfig,
    run: Run,
    *,
    batch: int = 16,
    anchors: int = 32,
    overlap_weight: float = 1.0,
    dropout: float = 0.0,
    temperature: float = 1.0,
    seed: int = 0,
    start: BlockHead | None = None,
    loss: str = "kl",
) -> BlockHead:
    """Train on ``tokens`` [M, 2, T] with ``labels`` [M].

    ``temperature`` is the sampling temperature of later use, applied to the compared distributions.
    A larger ``overlap_weight`` late in training trades calibration for acceptance. ``dropout`` is
    the share of pictures shown without their class, needed because under guidance a drafter drafts
    for both branches. ``start`` is a drafter to continue from, see :func:`go_on_from`.
    """
    with seeded(seed):
        drafter = BlockHead(config)
    target = target.eval().requires_grad_(False)
    start_from(drafter, target.norm.weight)
    if start is not None:
        go_on_from(drafter, start)

    @torch.compile
    def loss_of(classes: Tensor, pictures: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        seen = seen_by(target, classes, pictures, config.aux_layers)
        return block_loss(drafter, seen, target.output, at, temperature, loss, overlap_weight)

    def losses(classes: Tensor, pictures: Tensor, at: Tensor) -> Losses:
        losses, overlap = loss_of(classes, pictures, at)
        return {"loss": losses, **{f"overlap_{d + 1}": o for d, o in enumerate(overlap)}}

    def drawn(generator: torch.Generator) -> Tensor:
        last = target.config.block_size - config.levels
        return torch.rand(batch, last, generator=generator).argsort(1)[:, :anchors]

    common = (drafter, target, tokens, labels, run, losses, drawn)
    _learn(*common, batch=batch, dropout=dropout, seed=seed)
    return drafter


def _learn(
    head: nn.Module,
    target: Transformer,
    tokens: Tensor,
    labels: Tensor,
    run: Run,
    loss: Callable[[Tensor, Tensor, Tensor], Losses],
    drawn: Callable[[torch.Generator], Tensor],
    *,
    batch: int,
    dropout: float,
    seed: int,
) -> None:
    """Train ``head`` by the ``loss`` of each batch's classes [B], pictures [B, T] and random
    numbers ``drawn``; a share ``dropout`` of the pictures is shown without its class.
    """

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        rows = batch_rows(i, batch, len(tokens), seed)
        mirrored = torch.randint(2, (batch,), generator=generator)
        dropped = torch.rand(batch, generator=generator) < dropout
        chosen = (rows, mirrored, dropped, drawn(generator))
        rows, mirrored, dropped, extra = map(share, chosen)
        classes = labels[rows].masked_fill(dropped, target.config.num_classes)
        with torch.autocast("cpu", torch.bfloat16):
            return loss(classes, tokens[rows, mirrored], extra)

    fit(head, step, run, weight_decay=0.01)


@torch.no_grad()
def start_from(drafter: BlockHead, norm: Tensor) -> None:
    """Initialise ``drafter`` so that a feature is the target's hidden state, and the final norm has
    the target's weights ``norm`` [C].
    """
    width = drafter.config.target.dim
    drafter.fc.weight[:, width : 2 * width] = torch.eye(width)
    drafter.norm.weight.copy_(norm)


@torch.no_grad()
def go_on_from(drafter: BlockHead, other: BlockHead) -> None:
    """Initialise ``drafter`` from ``other``.

    Units of feed-forward layers that ``other`` lacks contribute nothing at first. Further levels
    begin with the query of its last level, because the cell gives their place. Raises
    ``ValueError`` if the two differ in layers or auxiliary layers, and for levels and units that
    the drafter lacks.
    """
    config = drafter.config
    begun = other.config
    extended = replace(begun, levels=max(begun.levels, config.levels), inner=config.inner)
    units = [sizes.inner or sizes.target.ffn_dim for sizes in (begun, config)]
    if extended != config or units[0] > units[1]:
        raise ValueError(
            "start must be a drafter with the same layers and auxiliary layers, and no more "
            f"levels and units, got one with {begun.levels} levels, {begun.layers} layers of "
            f"{units[0]} units, auxiliary layers {begun.aux_layers}"
        )
    state = drafter.state_dict()
    for name, old in other.state_dict().items():
        if name.endswith("feed_forward.w2.weight"):
            state[name].zero_()
        state[name][tuple(slice(size) for size in old.shape)] = old
    state["slots"][begun.levels :] = other.slots[-1]


def block_loss(
    drafter: BlockHead,
    seen: Seen,
    output: Head,
    at: Tensor,
    temperature: float = 1.0,
    loss: str = "kl",
    overlap_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The ``loss`` + ``overlap_weight`` · total variation, and the mean overlap Σ min(p, q) by
    level [K], for anchors ``at`` [B, A] of pictures that the target has ``seen``.

    It compares the drafter's distribution at a level, given the true previous token, with the
    target's, both at ``temperature``. ``output`` gives logits [B, N, V] of states [B, N, C].

    At anchor a, whose root is token a, features up to position a are read and tokens a + 1 … a + K
    drafted.
    """
    levels = drafter.config.levels
    count = seen.hidden.shape[1]
    features = drafter.features(seen.embedded, seen.hidden)  # e_i holds hidden i and token i
    order = torch.arange(count)[None]
    ahead = at[..., None] + 1 + torch.arange(levels)  # [B, A, K] tokens drafted
    anchor = features.gather(1, at[..., None].expand(-1, -1, features.shape[-1]))
    x = torch.cat([features, drafter.queries(anchor, levels)], dim=1)  # [B, T + A·K, C]
    cells = torch.cat([order.expand(len(at), -1), ahead.flatten(1)], dim=1)
    latest = torch.cat([order.expand(len(at), -1), at.repeat_interleave(levels, dim=1)], dim=1)
    visible = order[:, None] <= latest[..., None]  # [B, T + A·K, T]: nothing attends a query
    bias = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    bias = F.pad(bias, (0, ahead[0].numel()), value=float("-inf"))[:, None].to(seen.hidden.dtype)
    states = drafter(x, cells, bias, queries=ahead[0].numel())
    previous = seen.tokens.gather(1, ahead.flatten(1) - 1)
    drafted = output(drafter.read(states, previous)).float() / temperature  # [B, A·K, V]
    places = ahead.flatten(1)[..., None].expand_as(drafted)
    logits = seen.logits.gather(1, places).float() / temperature
    losses, overlap = compared(loss, logits, drafted)
    if overlap_weight:
        losses = losses + overlap_weight * compared("tv", logits, drafted)[0]
    return losses.mean(), overlap.unflatten(1, (-1, levels)).mean((0, 1))


def measure_acceptance(
    head: BlockHead, target: LlamaGenTarget, prompt: Any, seeds: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    """How often the block drafter's child of each level and rank is accepted, over one batch of
    pictures, one seed each, under exact decoding.
    """
    shape = spine(WIDEST[: head.config.levels], target.device)
    counter = AcceptanceCounter(BlockDrafter(head, target, shape), shape)
    uniforms = Uniforms.from_seeds(seeds, target.device)
    for _ in decode(target, counter, Recursive(), prompt, target.length, uniforms):
        pass
    return counter.table()


PROBS_WEIGHT = 0.1  # the weight of EAGLE's loss of distributions beside its SmoothL1


def train_eagle(
    target: Transformer,
    tokens: Tensor,
    labels: Tensor,
    run: Run,
    *,
    batch: int = 16,
    noise: float = 0.2,
    ffn_dim: int | None = None,
    seed: int = 0,
    loss: str = "kl",
) -> EagleHead:
    """Train on ``tokens`` [M, 2, T] (both mirrorings) with ``labels`` [M].

    The head reads the target's hidden states, shifted by uniform noise in ±``noise`` · 256 / T, and
    learns the next state and the output head's distribution on it, as EAGLE (arXiv 2401.15077) and
    LANTERN (2410.03355). Token embeddings are the target's, frozen. Raises ``ValueError`` for a
    target that is not class-conditional.
    """
    if target.config.model_type != "c2i":
        raise ValueError(f"target must be class-conditional (c2i), got {target.config.model_type}")
    with seeded(seed):
        head = EagleHead(EagleConfig(target.config, ffn_dim))
    target = target.eval().requires_grad_(False)
    head.embed_tokens.load_state_dict(target.tok_embeddings.state_dict())
    head.embed_tokens.requires_grad_(False)
    length = target.config.block_size

    def loss_of(classes: Tensor, pictures: Tensor, shift: Tensor) -> Losses:
        return eagle_loss(head, seen_by(target, classes, pictures, ()), target.output, shift, loss)

    def drawn(generator: torch.Generator) -> Tensor:
        shape = (batch, length - 1, target.config.dim)
        return (torch.rand(shape, generator=generator) - 0.5) * noise * 512 / length

    common = (head, target, tokens, labels, run, torch.compile(loss_of), drawn)
    _learn(*common, batch=batch, dropout=CLASS_DROPOUT, seed=seed)
    return head


def eagle_loss(
    head: EagleHead, seen: Seen, output: Head, shift: Tensor, loss: str = "kl"
) -> Losses:
    """Loss and its parts (SmoothL1 of the states, the ``loss`` of the distributions) for pictures
    that the target has ``seen``, with ``shift`` [B, T - 1, C] added to the hidden states read.

    ``output`` gives logits [B, N, V] of states [B, N, C]. ``overlap`` is the mean of Σ min(p, q),
    the probability that a single draft is accepted.
    """
    hidden = seen.hidden
    predicted = head(seen.embedded[:, :-1], hidden[:, :-1] + shift)
    losses, overlap = compared(loss, seen.logits[:, 1:], output(predicted))
    regression = F.smooth_l1_loss(predicted.float(), hidden[:, 1:].float())
    total = regression + PROBS_WEIGHT * losses.mean()
    return {"loss": total, "smooth_l1": regression, loss: losses.mean(), "overlap": overlap.mean()}
