"""Training of a small Janus that draws pictures from words and is asked about them.

The result is transformers' own ``JanusForConditionalGeneration`` (arXiv 2410.13848). What it learns
of guidance is what its ``generate`` asks for: prompts with all but their first token and the
picture's beginning replaced by padding.

Shape letters: B rows, L tokens, P tokens of a prompt, T tokens of a picture, V codes, W words,
C width, R pixels a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration

from recipes.captioned import KINDS, SIDE, STYLES, Captioned
from recipes.wording import BEGIN, IMAGE, chat, prompt
from specmm.core.randomness import seeded
from specmm.recipes.loop import MUON, Losses, Run, batch_rows, fit
from specmm.recipes.pictures import CLASS_DROPOUT, to_float

PROMPT = 16  # P: at most, with what begins a picture
TALK = 40  # tokens of a chat about a picture, at most
CHAT_EVERY = 8  # steps: one of so many is a chat
IGNORED = -100
HELD_OUT_EVERY = 200  # steps between two looks at held-out pictures


@dataclass(frozen=True)
class Sizes:
    """``dim`` and ``layers`` of the language model, ``tower_dim`` and ``tower_layers`` of what it
    sees by.
    """

    dim: int
    layers: int
    heads: int
    inner: int
    tower_dim: int
    tower_layers: int


def build_model(sizes: Sizes, vq: Any, tokenizer: Any, seed: int) -> JanusForConditionalGeneration:
    """A model with random weights but for those of the picture tokenizer ``vq``."""
    side = vq.config.num_patches
    tower: dict[str, Any] = dict(
        hidden_size=sizes.tower_dim,
        num_hidden_layers=sizes.tower_layers,
        num_attention_heads=sizes.tower_dim // 32,
        mlp_ratio=2,
        image_size=SIDE,
        patch_size=SIDE // side,
        projection_dim=sizes.dim,
        num_image_tokens=side**2,
    )
    text = dict(
        model_type="llama",
        vocab_size=len(tokenizer),
        hidden_size=sizes.dim,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    codes = vq.config.to_dict() | dict(projection_dim=sizes.dim, image_token_embed_dim=sizes.dim)
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    config = JanusConfig(
        vision_config=tower, text_config=text, vq_config=codes, image_token_id=image
    )
    with seeded(seed):
        model = JanusForConditionalGeneration(config)
    model.model.vqmodel.load_state_dict(vq.state_dict())
    model.model.vqmodel.requires_grad_(False)
    with torch.no_grad():  # codes that look alike begin alike
        model.model.generation_embeddings.weight.copy_(vq.quantize.embedding.weight)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        generation_kwargs={"boi_token_id": tokenizer.convert_tokens_to_ids(BEGIN)},
    )
    return model


@dataclass
class Drawing:
    """``ids`` [B, P + T]: prompts, their pictures' tokens (as W + code), padding; ``begins`` [B]:
    lengths of the prompts; ``codes`` [B, T].
    """

    ids: Tensor
    begins: Tensor
    codes: Tensor


@dataclass
class Talk:
    """``ids`` [B, L] of chats about ``pixels`` [B, 3, R, R]; ``labels`` [B, L] of the tokens that
    follow, ``IGNORED`` where no answer does.
    """

    ids: Tensor
    labels: Tensor
    pixels: Tensor


class Writer:
    """Turns pictures and words into rows of ids by ``tokenizer``, as its chat template does."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.begin = tokenizer.convert_tokens_to_ids(BEGIN)

    def prompt(self, text: str) -> list[int]:
        """Ids of a prompt up to the token that begins a picture."""
        turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        asked = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(asked + BEGIN)["input_ids"])

    def emptied(self, ids: Sequence[int]) -> list[int]:
        """The prompt that guidance leads away from."""
        kept = (self.tokenizer.bos_token_id, self.begin)
        return [token if token in kept else self.tokenizer.pad_token_id for token in ids]

    def drawing(self, texts: Sequence[str], codes: Tensor, random: Random | None) -> Drawing:
        """Rows of ``texts`` and ``codes`` [B, T]; with ``random`` some prompts are emptied."""
        words = len(self.tokenizer)
        ids = torch.full((len(texts), PROMPT + codes.shape[1]), self.tokenizer.pad_token_id)
        begins = []
        for row, text in enumerate(texts):
            asked = self.prompt(text)
            asked = [*asked[: PROMPT - 2], *asked[-2:]] if len(asked) > PROMPT else asked
            if random is not None and random.random() < CLASS_DROPOUT:
                asked = self.emptied(asked)
            begins.append(len(asked))
            ids[row, : len(asked)] = torch.tensor(asked)
            ids[row, len(asked) : len(asked) + codes.shape[1]] = words + codes[row]
        return Drawing(ids, torch.tensor(begins), codes)

    def talk(self, chats: Sequence[Sequence[tuple[str, str]]], pixels: Tensor, tokens: int) -> Talk:
        """Rows of ``chats`` about ``pixels``, each of so many ``tokens``."""
        shown = BEGIN + IMAGE * tokens + "<end_of_image>"
        length = tokens + 3 + TALK
        ids = torch.full((len(chats), length + 1), self.tokenizer.pad_token_id)
        answers = torch.zeros(ids.shape, dtype=torch.bool)
        for row, turns in enumerate(chats):
            found = self.tokenizer(f"<s>{shown}")["input_ids"]
            told = [False] * len(found)
            for question, answer in turns:
                asked = self.tokenizer(f"{question}<|assistant|>")["input_ids"]
                said = self.tokenizer(f"{answer}</s>")["input_ids"]
                found += asked + said
                told += [False] * len(asked) + [True] * len(said)
            found, told = found[: length + 1], told[: length + 1]
            ids[row, : len(found)] = torch.tensor(found)
            answers[row, : len(told)] = torch.tensor(told)
        return Talk(ids[:, :-1], ids.masked_fill(~answers, IGNORED)[:, 1:], pixels)


def picture_logits(model: Any, ids: Tensor, begins: Tensor, count: int) -> Tensor:
    """Logits [B, T, V] of ``count`` picture tokens after ``begins`` [B] tokens of ``ids``."""
    inner = model.model
    codes = model.prepare_embeddings_for_image_generation(
        torch.arange(inner.vqmodel.config.num_embeddings)
    )
    table = torch.cat([model.get_input_embeddings().weight, codes.float()])  # [W + V, C]
    hidden = inner.language_model(
        inputs_embeds=F.embedding(ids, table), use_cache=False
    ).last_hidden_state
    places = begins[:, None] - 1 + torch.arange(count)
    rows = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
    logits: Tensor = inner.generation_head(rows)
    return logits


def drawing_loss(logits: Tensor, codes: Tensor) -> Tensor:
    """Mean cross-entropy (nats a token) of ``codes`` [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), codes.flatten())


def answer_logits(model: Any, talk_ids: Tensor, pixels: Tensor, seen: int) -> Tensor:
    """Logits [B, L − seen, W] after ``talk_ids`` [B, L] but the ``seen`` ones of the picture."""
    image = model.model.get_image_features(pixels, return_dict=True).pooler_output  # [B, T, C]
    embedded = model.get_input_embeddings()(talk_ids)
    after = 2 + image.shape[1]
    embedded = torch.cat([embedded[:, :2], image.to(embedded.dtype), embedded[:, after:]], dim=1)
    hidden = model.model.language_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    logits: Tensor = model.lm_head(hidden[:, seen:])
    return logits


def train_model(
    model: Any,
    tokenizer: Any,
    pictures: Captioned,
    views: Tensor,
    codes: Tensor,
    held_out: tuple[Captioned, Tensor] | None,
    out: Path,
    *,
    steps: int,
    batch: int,
    lr: float,
    noise: float,
    seed: int,
) -> None:
    """Train ``model`` in place on ``views`` [N, views, R, R, 3] uint8 of ``pictures`` and their
    ``codes`` [N, views, T]; resumes from ``out``.

    Of the codes it reads a share ``noise`` is of other pictures' codes, so that it goes on well
    after a token that it would not have drawn. ``held_out`` pictures and their codes are looked at
    now and then.
    """
    writer = Writer(tokenizer)
    count = codes.shape[-1]
    draw = torch.compile(lambda ids, begins: picture_logits(model, ids, begins, count))
    answer = torch.compile(lambda ids, pixels: answer_logits(model, ids, pixels, count + 3))
    last = {"answers": torch.zeros(()), "right": torch.zeros(()), "held out": torch.zeros(())}

    def step(i: int) -> Losses:
        random = Random(f"janus {seed} {i}")
        if held_out is not None and i % HELD_OUT_EVERY == 0:
            last["held out"] = _held_out_loss(writer, draw, *held_out, batch)
        rows = batch_rows(i, batch, len(pictures), seed).tolist()
        shown = [random.randrange(codes.shape[1]) for _ in rows]
        if i % CHAT_EVERY == CHAT_EVERY - 1:
            talk = writer.talk(
                [chat(pictures, row, random) for row in rows], to_float(views[rows, shown]), count
            )
            with torch.autocast("cpu", torch.bfloat16):
                logits = answer(talk.ids, talk.pixels)
            labels = talk.labels[:, count + 3 :]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            told = labels != IGNORED
            right = (logits.argmax(-1) == labels)[told].float().mean()
            last.update({"answers": loss.detach(), "right": right})
            return {"loss": loss, **last}
        row = _drawing(writer, pictures, codes[rows, shown], rows, random)
        ids = _noisy(row.ids, codes, len(tokenizer), noise, seed + i)
        with torch.autocast("cpu", torch.bfloat16):
            logits = draw(ids, row.begins)
        return {"loss": drawing_loss(logits, row.codes), **last}

    fit(model, step, Run(out, steps, lr), muon=MUON * lr)


def _drawing(
    writer: Writer, pictures: Captioned, codes: Tensor, rows: Sequence[int], random: Random | None
) -> Drawing:
    """Rows ``rows`` of ``pictures`` with ``codes`` [B, T]; without ``random``, as it is asked."""
    words = [prompt(pictures, row, random or Random(row)) for row in rows]
    return writer.drawing(words, codes, random)


def _held_out_loss(
    writer: Writer, draw: Any, pictures: Captioned, codes: Tensor, batch: int
) -> Tensor:
    """Mean cross-entropy of all whole batches of ``pictures`` with ``codes`` [N, T]."""
    losses = []
    for first in range(0, len(pictures) - batch + 1, batch):
        rows = range(first, first + batch)
        row = _drawing(writer, pictures, codes[first : first + batch], rows, None)
        with torch.autocast("cpu", torch.bfloat16):  # with gradients: the program that training has
            losses.append(drawing_loss(draw(row.ids, row.begins), row.codes).detach())
    return torch.stack(losses).mean()


def _noisy(ids: Tensor, codes: Tensor, words: int, noise: float, seed: int) -> Tensor:
    """``ids`` with a share ``noise`` of their picture tokens replaced by any of ``codes``."""
    generator = torch.Generator().manual_seed(seed)
    changed = torch.rand(ids.shape, generator=generator) < noise
    others = codes.flatten()[torch.randint(codes.numel(), ids.shape, generator=generator)]
    return torch.where(changed & (ids >= words), words + others, ids)


class Classifier(nn.Module):
    """A tower and its projector with linear heads for what is asked: name, kind and style."""

    def __init__(self, model: Any, names: int) -> None:
        super().__init__()
        self.tower = model.model.vision_model
        self.aligner = model.model.aligner
        width = model.config.text_config.hidden_size
        self.counts = [names, len(KINDS), len(STYLES)]
        self.head = nn.Linear(width, sum(self.counts))

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, classes] of each head for ``pixels`` [B, 3, R, R]."""
        seen = self.aligner(self.tower(pixels, return_dict=True).last_hidden_state)  # [B, T, C]
        return self.head(seen.mean(1)).split(self.counts, dim=-1)


def train_tower(
    model: Any,
    pictures: Captioned,
    views: Tensor,
    out: Path,
    *,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
) -> None:
    """Teach the model's tower and projector, in place, what ``views`` of ``pictures`` show."""
    names = sorted(set(pictures.names))
    index = {name: i for i, name in enumerate(names)}
    labels = torch.stack(
        [
            torch.tensor([index[name] for name in pictures.names]),
            torch.from_numpy(pictures.kinds),
            torch.from_numpy(pictures.styles),
        ]
    )
    with seeded(seed):
        classifier = Classifier(model, len(names))
    run = torch.compile(classifier)

    def step(i: int) -> Losses:
        rows = batch_rows(i, batch, len(pictures), seed)
        generator = torch.Generator().manual_seed(seed + i)
        shown = torch.randint(views.shape[1], rows.shape, generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            logits = run(to_float(views[rows, shown]))
        parts = [
            F.cross_entropy(found.float(), wanted[rows])
            for found, wanted in zip(logits, labels, strict=True)
        ]
        kinds = (logits[1].argmax(-1) == labels[1][rows]).float().mean()
        return {"loss": torch.stack(parts).sum(), "kinds": kinds}

    fit(classifier, step, Run(out, steps, lr), muon=MUON * lr)
