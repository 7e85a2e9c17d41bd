"""Transformers models that draw pictures token by token, as targets.

Each model class is described by one :class:`PictureModel`; no other code is specific to it.

Shape letters: B batch, T tokens of a picture, H and W pixels of its sides, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specmm import zoo
from specmm.core.cache import branched
from specmm.core.guidance import AllowedTokens, Guidance
from specmm.core.processors import Processor
from specmm.hf.models.families import Family
from specmm.hf.models.restricted_head import restricted
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class Layout:
    """How a picture is drawn: ``rows`` rows of ``columns`` picture tokens.

    ``length`` T counts all drawn tokens, row ends included; ``allowed`` says which token may come
    where. ``places`` [3, T] are M-RoPE positions, counted from the first token drawn (None:
    positions are consecutive).
    """

    rows: int
    columns: int
    length: int
    allowed: AllowedTokens
    places: Tensor | None = None


Example = Callable[[], tuple[Sequence[int], Sequence[int]]]
"""The ids of a prompt, and of what guidance leads away from."""


@dataclass(frozen=True)
class Painting:
    """Inputs other than tokens for the diffusion model that paints a picture's pixels."""

    text: str  # the prompt
    generator: torch.Generator
    options: dict[str, Any]  # given options of the diffusion model


Decoder = Callable[[Tensor, Layout, Painting], Tensor]
"""Tokens [1, T] to a picture [1, 3, H, W] in [-1, 1]."""


@dataclass(frozen=True)
class PictureModel:
    """A class of transformers that draws pictures, described by functions of a model.

    ``head`` turns states [..., C] into logits [..., V], and ``embed`` drawn tokens [...] into [...,
    C]; both default to the model's own. ``layout`` gives the layout of a picture of some size
    (None: the usual size), and raises ``ValueError`` for a size that the model does not draw.
    ``ids`` gives the ids of a prompt, up to the first token drawn, by the model's tokenizer;
    ``away`` turns them into the unconditional prompt (None: it is the empty prompt). ``decode``
    makes the decoder from tokens to pixels, from the model and the files in its folder, or raises
    ``ValueError``. ``codebook`` gives the picture tokens' ids [W], ascending, and their codes [W,
    E], None if the folder has no tokenizer. ``cfg`` is the usual guidance scale, ``sampling`` the
    usual settings by name, by default those of a ``generation_config`` that samples. Tokens are
    ``shared`` if they have the same ids when drawn as in prompts. ``parts`` are the folders of
    model and tokenizer in a diffusers pipeline, if the model comes in one; ``paints``: its pixels
    are made by diffusion. ``check`` raises ``ValueError`` for a model that cannot draw. A
    checkpoint must have weights with ``scores`` in their names; it may lack weights whose names
    begin with ``unneeded``, which ``fill`` then takes from elsewhere in the folder. ``keep`` copies
    the files that ``decode`` reads into another folder. ``marks``, for a class that also draws
    between words, gives the ids that begin and end a picture there, and raises ``ValueError`` for a
    model that cannot.
    """

    architecture: str  # the class
    layout: Callable[[Any, Size | None], Layout]
    ids: Callable[[Any, Any, str, Layout], list[int]]
    decode: Callable[[Any, Path], Decoder]
    codebook: Callable[[Any], tuple[Tensor, Tensor | None]]
    away: Callable[[Any, Any, Sequence[int]], list[int]] | None = None
    head: Callable[[Any], Callable[[Tensor], Tensor]] = lambda model: model.get_output_embeddings()
    embed: Callable[[Any], Callable[[Tensor], Tensor]] = lambda model: model.get_input_embeddings()
    cfg: float = 1.0
    sampling: Callable[[Any], dict[str, Any]] = lambda model: own_sampling(model)
    shared: bool = True
    parts: tuple[str, str] = ("", "")
    paints: bool = False
    check: Callable[[Any], None] = lambda model: None
    scores: str = ""
    unneeded: str | None = None
    fill: Callable[[Any, Path], None] = lambda model, folder: None
    keep: Callable[[Path, Path], None] = lambda folder, into: None
    marks: Callable[[Any], tuple[int, int]] | None = None

    def folders(self, folder: Path) -> tuple[Path, Path]:
        """Folders of model and tokenizer within ``folder``, a pipeline's or the model's own."""
        if not (folder / zoo.PIPELINE).is_file():
            return folder, folder
        return folder / self.parts[0], folder / self.parts[1]


def own_sampling(model: Any, samples: bool = False) -> dict[str, Any]:
    """The guidance of the ``model``'s generate and, if its ``generation_config`` samples or
    ``samples`` is set, its sampling settings, with transformers' defaults for settings that it
    leaves open.
    """
    config = model.generation_config
    scale = config.guidance_scale
    settings = {} if scale is None else {"cfg": float(scale)}
    if not (samples or config.do_sample):
        return settings
    usual = GenerationConfig._get_default_generation_params()
    for name in ("temperature", "top_k", "top_p"):
        value = getattr(config, name)
        settings[name] = usual[name] if value is None else value
    return settings


class PictureTarget(VLMTarget):
    """A model of transformers, by its ``facts``, as a target that draws pictures of ``layout``."""

    processor: Processor
    guidance: Guidance
    static_shapes: ClassVar[bool] = False
    prompted: ClassVar[bool] = True

    def __init__(
        self,
        model: PreTrainedModel,
        facts: PictureModel,
        processor: Processor,
        guidance: Guidance,
        name: str = "pictures",
        layout: Layout | None = None,
        example: Example | None = None,
    ) -> None:
        self.facts = facts
        self.layout = layout or facts.layout(model, None)
        allowed = self.layout.allowed.to(model.device)
        drawable = allowed.masks.any(0)
        family = Family(
            model=model,
            body=model.base_model,
            decoder=model.get_decoder(),
            head=restricted(facts.head(model), drawable),
            embedding=facts.embed(model),
            config=model.config.get_text_config(),
            vocabulary=allowed.masks.shape[-1],
            foreign=True,
            shared=facts.shared,
        )
        super().__init__(model, processor, name, family, guidance, allowed)
        self.length = self.layout.length  # T
        places = self.layout.places
        self.grid = places if places is None else places.to(model.device)  # [3, T]
        self.example = example
        never = (~drawable).nonzero()[:1, 0].tolist()
        self.undrawable = never[0] if never else None

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.family.vocabulary

    @property
    def columns(self) -> int:
        """Picture tokens a row."""
        return self.layout.columns

    @property
    def line(self) -> int:
        """Tokens a row, with its end token; of the picture itself if it also has a preview."""
        previewed = self.grid is not None
        return self.layout.columns if previewed else self.length // self.layout.rows

    @property
    def codes(self) -> int:
        """The number of tokens allowed at a picture's first place."""
        return int(self.allowed_tokens.masks[self.allowed_tokens.places[0]].sum())

    @property
    def allowed_tokens(self) -> AllowedTokens:
        """The tokens allowed at each place."""
        assert self.allowed is not None
        return self.allowed

    def read_layers(self, layers: Sequence[int], normed: bool = False) -> None:
        """Let drafters read the states that the head reads, followed by the inputs of ``layers``
        [R, N, C·(1 + F)].

        Raises ``ValueError`` for layers that the model does not have, and for layer 0.
        """
        super().read_layers([layer - 1 for layer in layers], normed)

    def _drafters_states(self, states: Tensor) -> Tensor:
        if self.aux is None:
            return states
        return torch.cat([states, self.aux.context()], dim=-1)

    def with_processor(self, processor: Processor) -> PictureTarget:
        """A target of the same model with another processor."""
        options = (self.guidance, self.name, self.layout, self.example)
        return PictureTarget(self.model, self.facts, processor, *options)

    def any_prompt(self, batch: int) -> VLMPrompt:
        """The example prompt, ``batch`` times; raises ``ValueError`` if there is none."""
        if self.example is None:
            raise ValueError(f"{self.name} must be given an example of a prompt to measure on")
        ids, away = self.example()
        return picture_prompt(self, [ids] * batch, [away] * batch)

    def where(self, positions: Tensor) -> Tensor:
        """Positions; by the tokens' places in the picture if the layout has such (M-RoPE)."""
        if self.grid is None:
            return super().where(positions)
        begins = branched(self.begins[:, None], self.branches)
        drawn = (positions - begins).clamp(0, self.length - 1)  # drafts may reach beyond the end
        return begins + self.offsets[..., None] + self.grid[:, drawn]  # [3, R, N]


def picture_prompt(
    target: PictureTarget, prompts: Sequence[Sequence[int]], away: Sequence[Sequence[int]]
) -> VLMPrompt:
    """Prompts for pictures from lists of ids that end with the tokens that begin a picture, and
    from the unconditional prompts ``away``.
    """
    negative = None
    if target.branches > 1:
        negative = VLMPrompt(padded([list(row) for row in away]), target.length)
    ids = padded([list(row) for row in prompts])
    return VLMPrompt(ids, target.length, unconditional=negative).to(target.device, torch.float32)


def lined(rows: int, columns: int, pictures: Tensor, line: Tensor) -> Layout:
    """The layout of ``rows`` that end with a line token; masks [V] mark both kinds of tokens."""
    places = torch.zeros(rows, columns + 1, dtype=torch.int64)
    places[:, -1] = 1
    allowed = AllowedTokens(torch.stack([pictures, line]), places.flatten())
    return Layout(rows, columns, rows * (columns + 1), allowed)


def token_side(model: Any) -> int:
    """Pixels of a token's side; the image tokenizer halves pictures at each level but the first."""
    return int(2 ** (len(model.config.vq_config.channel_multiplier) - 1))


def token_codes(model: Any) -> tuple[Tensor, Tensor]:
    """Ids of the picture tokens of ``model``'s vocabulary, in order, and their codes."""
    ids, codes = zip(*sorted(model.model.vocabulary_mapping.bpe2img.items()), strict=True)
    return torch.tensor(ids, device=model.device), torch.tensor(codes, device=model.device)


def unit_codebook(model: Any) -> tuple[Tensor, Tensor]:
    """Ids and unit-length rows of a codebook in which every token is a code."""
    rows = F.normalize(model.model.vqmodel.quantize.embedding.weight.detach().float(), dim=-1)
    return torch.arange(len(rows), device=rows.device), rows


def square(tokens: int, size: Size | None, side: int, allowed: AllowedTokens) -> Layout:
    """The layout of a model that draws only squares of ``tokens`` tokens and ``side`` pixels.

    Raises ``ValueError`` for another ``size``, and if ``tokens`` is not a square number.
    """
    if size is not None and size != (side, side):
        raise ValueError(
            f"height and width must be {side} for this model, got {size[0]} and {size[1]}"
        )
    rows = round(tokens**0.5)
    if rows**2 != tokens:
        raise ValueError(f"a picture must have a square number of tokens, got {tokens}")
    return Layout(rows, rows, tokens, allowed)
