"""``TransformersImagePipeline``: pictures from a model of transformers that draws token by token.

Shape letters: B pictures of a batch, T tokens a picture, H and W pixels of its sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import torch
import transformers
from torch import Tensor

from specmm import methods, zoo
from specmm.choose.when_compiled import Compiled
from specmm.core.randomness import further
from specmm.extending.kinds import check_at_least, check_numbers, check_whole, texts_of
from specmm.extending.outside import with_own
from specmm.hf.drafters.drafter_formats import ModelFolder
from specmm.hf.loading.placing import Placing
from specmm.hf.loading.pretrained import load_model, load_tokenizer, use_tree_attention
from specmm.hf.models.static import StaticPictureTarget
from specmm.hf.pictures.picture_tokens import (
    Decoder,
    Layout,
    Painting,
    PictureModel,
    PictureTarget,
    picture_prompt,
)
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.image_ar.autoencoder import to_uint8
from specmm.image_ar.calls import Callback, check_saving, negatives_of
from specmm.image_ar.files import SETTINGS, read_settings, write_settings
from specmm.image_ar.pipeline import picture_type
from specmm.image_ar.shared import Batch, Drawn, ImageOutput, made_when_asked
from specmm.image_ar.tokens.assemble import PictureParts
from specmm.image_ar.tokens.pipeline import LlamaGenSettings
from specmm.image_ar.tokens.running import TokenPictures
from specmm.loading.hardware import Place, contiguous_state, prepack

EXAMPLE = "a red apple on a table"  # measurements before the first prompt use it


class Wanted(NamedTuple):
    """A picture to draw: the ids of its prompt, the ids of the prompt that guidance leads ``away``
    from, the prompt's ``text``, and ``options`` for a diffusion model that paints it.
    """

    ids: list[int]
    away: list[int]
    text: str
    options: dict[str, Any]


class TransformersImagePictures(TokenPictures):
    """A model of transformers that draws pictures, and its tokenizer.

    Several threads may share one.

    >>> pipe = ImagePipeline.from_pretrained("path/to/chameleon", method="sjd")
    >>> out = pipe(prompt="a red barn", generator=torch.Generator().manual_seed(0))
    """

    tokenizer: transformers.PreTrainedTokenizerBase
    registry = methods.TRANSFORMERS_IMAGES
    static = StaticPictureTarget
    call_options = ("negative_prompt", "height", "width", "num_inference_steps", "guidance_scale")
    takes = "prompt"
    _drew: Layout | None = None  # the layout of the last pictures
    batch_invariant = False  # a prompt's padding depends on the longest of its batch

    def __init__(
        self,
        transformer: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        facts: PictureModel,
        folder: Path,
        method: str | methods.Method = "ar",
        name: str = "pictures",
    ) -> None:
        if (folder / SETTINGS).exists():
            settings = read_settings(LlamaGenSettings, folder)
        else:
            settings = LlamaGenSettings(**{"cfg": facts.cfg, **facts.sampling(transformer)})
        super().__init__(settings, method, name, transformer.config.model_type)
        self.register_modules(transformer=transformer, tokenizer=tokenizer)
        self.facts = facts
        self.paints = facts.paints
        self.folder = folder
        self.parts = PictureParts()
        self.moved()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | methods.Method = "ar",
        torch_dtype: torch.dtype | str | None = None,
        text_encoder: str | Path | None = None,
        device: torch.device | str | None = None,
        drafter: Any = None,
        *,
        dtype: torch.dtype | str | None = None,
        device_map: str | dict[str, Any] | None = None,
        quantization_config: Any = None,
        variant: str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
    ) -> Self:
        """A pipeline of a folder or hub id, on this machine's best device and in its fastest dtype
        unless they are given; ``dtype`` is another name of ``torch_dtype``.

        A ``drafter`` is a third-party object (see :func:`specmm.register`). ``device_map``,
        ``quantization_config`` and ``variant`` are transformers'; ``revision`` and ``cache_dir``
        are a hub id's. Raises ``ValueError`` for any other drafter, and for ``text_encoder``: these
        models read prompts themselves.
        """
        if text_encoder is not None:
            raise ValueError(f"text_encoder must be None for {name}, which reads prompts itself")
        method, folder_of_one = with_own(methods.TRANSFORMERS_IMAGES, method, drafter)
        if folder_of_one is not None:
            raise ValueError(
                f"drafter must be your own object for {name}, got the folder {folder_of_one}: "
                "trained drafters are for LlamaGen; sjd and gsd need none"
            )
        piped = (Path(name) / zoo.PIPELINE).is_file()
        place = Place.named(device, dtype, torch_dtype, device_map)
        index = zoo.PIPELINE if piped else zoo.TRANSFORMERS
        folder = zoo.find(name, index, zoo.Source(revision=revision, cache_dir=cache_dir))
        facts = picture_type(folder)
        if facts is None:
            raise ValueError(f"{folder} must hold a model of transformers that draws pictures")
        weights, words = facts.folders(folder)
        placing = Placing.of(weights, place, device_map, quantization_config, variant)
        model = placing.put(_loaded(facts, weights, placing)).eval()
        prepack(use_tree_attention(model))
        return cls(model, load_tokenizer(words), facts, folder, method, str(name))

    def save_pretrained(  # type: ignore[override]  # in the dtype that was loaded
        self, folder: str | Path, **diffusers: Any
    ) -> None:
        """Write the model, its tokenizer and settings, and the decoder of its pixels."""
        check_saving(diffusers)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not folder.samefile(self.folder):
            self.facts.keep(self.folder, folder)
        weights, words = self.facts.folders(folder)
        self.transformer.save_pretrained(weights, state_dict=contiguous_state(self.transformer))
        self.tokenizer.save_pretrained(words)
        write_settings(self.settings, folder)

    @property
    def components(self) -> dict[str, Any]:
        """Networks and tokenizer; all other parts of the pipeline come from the folder."""
        return {name: getattr(self, name) for name in ("transformer", "tokenizer")}

    def __call__(
        self,
        prompt: str | Sequence[str],
        num_images_per_prompt: int = 1,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        method: str | methods.Method | None = None,
        drafter: Any = None,
        tree: Any = None,
        rule: Any = None,
        cfg: float | None = None,
        cfg_interval: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        batch_size: int = 8,
        output_type: str = "pil",
        callback_on_step_end: Callback | None = None,
        compiled: Compiled = False,
        *,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = None,
        return_dict: bool = True,
        seed: int | Sequence[int] | None = None,
        **elsewhere: Any,
    ) -> ImageOutput:
        """Draw ``num_images_per_prompt`` pictures of every prompt.

        ``drafter``, ``tree`` and ``rule`` replace the method's: names, or your own objects (see
        :func:`specmm.register`). Other options default to the model's settings. Guidance leads away
        from ``negative_prompt`` (one text, or one for each prompt), or from the model's own
        unconditional prompt. ``height`` and ``width`` are pixels, both or none, for models that
        draw several sizes. ``num_inference_steps`` and ``guidance_scale`` go to the diffusion model
        that paints pixels, if there is one; otherwise ``guidance_scale`` is ``cfg``. ``seed`` or
        ``generator`` is one a picture, or the first one's: seeds of the others follow. The random
        numbers of a picture depend only on its own seed. ``output_type`` "latent" gives tokens
        alone. ``compiled`` runs steps and rounds as programs of ``torch.compile``, made at the
        first call of a method, its options, a size and a number of pictures at a time; "auto" does
        so once it pays (:mod:`specmm.choose.when_compiled`). Raises ``ValueError`` for an empty
        list of prompts, an unknown method, options out of range, a size that the model does not
        draw, pixels if the folder has no decoder, and for anything that cannot be compiled.
        """
        output: ImageOutput = self.called(locals())
        return output

    def asked(self, args: Mapping[str, Any], target: PictureTarget) -> list[Wanted]:
        texts = texts_of("prompt", args["prompt"])
        if not texts:
            raise ValueError("prompt must name at least one picture, got none")
        if not all(text.strip() for text in texts):
            raise ValueError("prompt must say what to draw, got an empty one")
        negatives = negatives_of(args["negative_prompt"], len(texts))
        if args["negative_prompt"] is not None and target.branches == 1:
            raise ValueError(
                f"negative_prompt needs cfg above 1, got {target.guidance.scale}, at which it has "
                "no effect"
            )
        options = self._painting_options(args["num_inference_steps"], args["guidance_scale"])
        prompts = []
        for text, negative in zip(texts, negatives, strict=True):
            ids = self._ids(text, target.layout)
            prompt = Wanted(ids, self._away(ids, negative, target.layout), text, options)
            prompts += [prompt] * args["num_images_per_prompt"]
        target.check(_prompt(target, prompts))
        if args["output_type"] != "latent":
            self.decoder()  # or there are no pixels
        return prompts

    def prompt(self, batch: Batch[methods.Method]) -> VLMPrompt:
        return _prompt(batch.on, batch.of)

    def draw(self, batch: Batch[methods.Method]) -> Drawn:
        seeds = [further(one) for one in batch.generators]  # before tokens take their numbers
        self._drew = batch.on.layout
        drawn = super().draw(batch)
        paintings = [
            Painting(one.text, seed, one.options) for one, seed in zip(batch.of, seeds, strict=True)
        ]
        drawn.latents = [
            (tokens, batch.on.layout, painting)
            for tokens, painting in zip(drawn.tokens.split(1), paintings, strict=True)
        ]
        return drawn

    def target(
        self,
        cfg: float | None = None,
        cfg_interval: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        layout: Layout | None = None,
        example: str = EXAMPLE,
    ) -> PictureTarget:
        """The model as a target under these options; None stands for the model's setting.

        Methods are measured on the prompt ``example``.
        """
        scale = self.settings.cfg if cfg is None else cfg
        check_numbers(cfg=scale)
        if not scale >= 1:  # only scales above 1 guide, and a certificate names the scale
            raise ValueError(f"cfg must be at least 1, got {scale}, use 1 for no guidance")
        filters = dict(temperature=temperature, top_k=top_k, top_p=top_p)
        guidance, processor = self.sampled(cfg=cfg, cfg_interval=cfg_interval, **filters)
        where = layout or self._layout()

        def ids() -> tuple[list[int], list[int]]:
            token_ids = self._ids(example, where)
            return token_ids, self._away(token_ids, None, where)

        common = (self.name, where, ids)
        return PictureTarget(self.transformer, self.facts, processor, guidance, *common)

    def work(self, target: PictureTarget) -> tuple[Any, ...]:
        return *super().work(target), (target.layout.rows, target.layout.columns)

    def measured(
        self, sampling: Mapping[str, Any], prompt: str | None = None, **wanted: Any
    ) -> PictureTarget:
        layout = self._layout(wanted.get("height"), wanted.get("width"))
        return self.target(**sampling, layout=layout, example=prompt or EXAMPLE)

    def moved(self) -> None:
        super().moved()
        self.parts.code_ids, self.parts.codebook = self.facts.codebook(self.transformer)
        self._decoder: Decoder | None = None
        self._drew = None

    def decoder(self) -> Decoder:
        """The decoder from tokens to pixels; raises ``ValueError`` if the folder has none."""
        if self._decoder is None:
            self._decoder = self.facts.decode(self.transformer, self.folder)
        return self._decoder

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Pictures [B, H, W, 3] uint8 of tokens [B, T], in the size that was drawn last. An
        arbitrary code is shown where a callback's tokens are ``NOT_DRAWN``.

        Raises ``ValueError`` for models whose pixels a diffusion model paints.
        """
        if self.paints:
            raise ValueError(
                f"decode_tokens does not serve {self.name}, whose pixels a diffusion model "
                "paints; take the call's images"
            )
        layout = self._drew or self._layout()
        painting = Painting("", torch.Generator(), {})
        return self.pixels([(row, layout, painting) for row in tokens.split(1)])

    @torch.inference_mode()
    def pixels(self, latents: Any) -> Tensor:
        """Pictures uint8 [B, H, W, 3]; places not drawn yet show any code."""
        decoder = self.decoder()
        assert self.parts.code_ids is not None
        any_code = int(self.parts.code_ids[0])
        codes = [(tokens.where(tokens >= 0, any_code), *rest) for tokens, *rest in latents]
        return torch.cat([to_uint8(decoder(*picture)) for picture in codes])  # [B, H, W, 3]

    def _painting_options(self, steps: int | None, guidance: float | None) -> dict[str, Any]:
        """Options for the diffusion model; raises ``ValueError`` if given without such a model."""
        options = {"num_inference_steps": steps, "guidance_scale": guidance}
        chosen = {name: value for name, value in options.items() if value is not None}
        if chosen and not self.facts.paints:
            raise ValueError(
                f"{' and '.join(chosen)} must be None for {self.name}, whose pixels no diffusion "
                "model paints; cfg is the guidance of its tokens"
            )
        check_whole(num_inference_steps=1 if steps is None else steps)
        check_at_least(1, num_inference_steps=1 if steps is None else steps)
        check_numbers(guidance_scale=1 if guidance is None else guidance)
        if guidance is not None and not guidance > 0:
            raise ValueError(
                f"guidance_scale must be above 0, got {guidance}, use 1 for no guidance"
            )
        return chosen

    def _layout(self, height: int | None = None, width: int | None = None) -> Layout:
        """The layout of pictures of this size; raises ``ValueError`` for an unsupported size."""
        if height is None and width is None:
            return self.facts.layout(self.transformer, None)
        if height is None or width is None:
            raise ValueError(f"give both height and width, got {height} and {width}")
        check_whole(height=height, width=width)
        return self.facts.layout(self.transformer, (height, width))

    def padded(self, asked: Sequence[Wanted]) -> bool:
        return len({(len(one.ids), len(one.away)) for one in asked}) > 1

    def length_of(self, prompt: str) -> int:
        return len(self._ids(prompt, self._layout()))

    def _ids(self, text: str, layout: Layout) -> list[int]:
        return self.facts.ids(self.transformer, self.tokenizer, text, layout)

    def _away(self, ids: Sequence[int], negative: str | None, layout: Layout) -> list[int]:
        """The ids of the unconditional prompt for a prompt of ``ids``."""
        if negative is None and self.facts.away is not None:
            return self.facts.away(self.transformer, self.tokenizer, ids)
        return self._ids(negative or "", layout)


def _prompt(target: PictureTarget, pictures: Sequence[Wanted]) -> VLMPrompt:
    return picture_prompt(target, [one.ids for one in pictures], [one.away for one in pictures])


def _loaded(facts: PictureModel, folder: Path, placing: Placing) -> Any:
    """The model in ``folder``; raises ``ValueError`` if it cannot draw pictures."""
    names = ModelFolder(folder).weights
    if names and not any(facts.scores in name for name in names):
        raise ValueError(
            f"{folder} must hold weights that score pictures ({facts.scores}…), got none, so it "
            "only writes; use a checkpoint that draws, or VQAPipeline for questions"
        )
    kind = getattr(transformers, facts.architecture)
    fills = facts.unneeded and names and not any(n.startswith(facts.unneeded) for n in names)

    def load(dtype: torch.dtype | None) -> Any:
        return load_model(kind, folder, facts.unneeded, dtype=dtype or "auto", **placing.options)

    # the weights that fill the rest have at least the wanted dtype
    model = load(placing.place.dtype) if fills else placing.loaded(load)
    facts.check(model)
    if fills:
        facts.fill(model, folder)
    return model


if TYPE_CHECKING:
    TransformersImagePipeline: TypeAlias = TransformersImagePictures

__getattr__ = made_when_asked(TransformersImagePictures)
