"""Tiny random models of every kind that draws pictures, and what their own classes draw."""

from dataclasses import dataclass, replace
from typing import Any

import diffusers
import numpy as np
import torch
import transformers as tf
from tokenizers import pre_tokenizers

import specmm
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.hf.pictures.picture_tokens import PictureTarget, picture_prompt
from tests.tiny import chameleon, glm_image, parts
from tests.tiny.processors import word_tokenizer

CODES = 8
VISUAL = [f"<|visual token {i:06d}|>" for i in range(CODES)]
NAMED = dict(image_token="<image>", boi_token="<boi>", eoi_token="<eoi>")
NAMED |= dict(image_wrapper_token="<wrap>", eof_token="<|extra_201|>")
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", *NAMED.values(), "<|extra_200|>", *VISUAL]
WORDS = ["a", "red", "blue", "barn", "tree", "on", "hill", *"*0123456789"]
IDS = {name: i for i, name in enumerate([*SPECIAL, *WORDS])}
TEXT = parts.TEXT | dict(model_type="llama", vocab_size=len(IDS), max_position_embeddings=128)
VQ = dict(embed_dim=4, base_channels=32, channel_multiplier=[1, 1, 1], num_res_blocks=1)
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %} {{ c['text'] }} {% endfor %}{% endfor %}"
)
PROMPTS = ["a red barn on a hill", "blue tree"]
SCALE = 3.0


SPLITS = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits()]
SPLITS = pre_tokenizers.Sequence([*SPLITS, pre_tokenizers.Split("*", "isolated")])


def tokenizer(template=None):
    return word_tokenizer(SPECIAL, WORDS, SPLITS, NAMED, template)


QUIET = ("vqmodel", "vision_model", "visual")


def loud(model):
    """Random weights whose next tokens depend on the text."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and not any(part in name for part in QUIET):
                parameter.normal_(0, 0.5 if "embed" in name else 0.25)
    return model.eval()


def janus():
    tower = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=12)
    tower |= dict(patch_size=4, projection_dim=32, mlp_ratio=2, depth=2, num_image_tokens=9)
    vq = VQ | dict(num_embeddings=CODES, latent_channels=4, num_hidden_layers=1)
    vq |= dict(projection_dim=32, image_token_embed_dim=32)
    config = tf.JanusConfig(
        vision_config=tower, text_config=TEXT, vq_config=vq, image_token_id=IDS["<image>"]
    )
    model = loud(tf.JanusForConditionalGeneration(config))
    more = {"boi_token_id": IDS["<boi>"]}
    model.generation_config = tf.GenerationConfig(
        bos_token_id=1, pad_token_id=0, generation_kwargs=more
    )
    return model


def emu3(**text):
    vq = VQ | dict(
        codebook_size=CODES, attn_resolutions=[], temporal_downsample_factor=1, hidden_size=32
    )
    config = tf.Emu3Config(
        vq_config=vq,
        text_config=TEXT | dict(model_type="emu3_text_model") | text,
        vocabulary_map=IDS,
        image_token_id=IDS["<image>"],
    )
    return loud(tf.Emu3ForConditionalGeneration(config))


def drawn_by_janus(model, words, texts, size, cfg):
    pictures = tf.JanusImageProcessor(size=dict(height=8, width=8), min_size=4)
    processor = tf.JanusProcessor(pictures, words, chat_template=TEMPLATE, num_image_tokens=9)
    turns = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
    asked = [processor.apply_chat_template(turn, add_generation_prompt=True) for turn in turns]
    inputs = processor(text=asked, generation_mode="image", padding=True, return_tensors="pt")
    return model.generate(**inputs, generation_mode="image", do_sample=False, guidance_scale=cfg)


def drawn_by_emu3(model, words, texts, size, cfg):
    """With the constraint that the released model's users write."""
    rows, columns = (pixels // 4 for pixels in size)
    pictures = [IDS[name] for name in VISUAL]

    def allowed(_, ids):
        place = len(ids) - int((ids == IDS["<wrap>"]).nonzero()[0])
        if place % (columns + 1) == 0:
            return [IDS["<|extra_200|>"]]
        return pictures

    def asked(texts):
        full = [f"<s>{text}<boi>{rows}*{columns}<wrap>" for text in texts]
        return words(full, padding=True, return_tensors="pt")

    inputs = asked(texts)
    away = asked([""] * len(texts))
    found = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=rows * (columns + 1),
        guidance_scale=cfg,
        negative_prompt_ids=away["input_ids"],
        negative_prompt_attention_mask=away["attention_mask"],
        prefix_allowed_tokens_fn=allowed,
        eos_token_id=None,
    )
    return found[:, inputs["input_ids"].shape[1] :]


def drawn_by_glm_image(model, words, texts, size, cfg):
    """As diffusers calls it, but greedy, and without what ends pictures, which random weights draw
    anywhere.
    """
    inputs = glm_image.inputs(texts, size)
    found = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=int(inputs["image_grid_thw"][:2].prod(-1).sum()),
        suppress_tokens=[glm_image.BEGIN, glm_image.END],
        eos_token_id=None,
    )
    return found[:, inputs["input_ids"].shape[1] :]


def drawn_by_chameleon(model, words, texts, size, cfg):
    """By forwards without a cache, from prompts as Anole's release writes them."""
    ids = chameleon.IDS
    begin = [ids[chameleon.BEGIN]]
    asked = [[ids["<s>"], *spoken(words, text), ids[chameleon.TURN], *begin] for text in texts]
    kinds = [chameleon.PICTURE] * chameleon.SIDE**2
    return torch.tensor([guided(model, row, [ids["<s>"], *begin], kinds, cfg) for row in asked])


def drawn_by_lumina(model, words, texts, size, cfg):
    """The same, from prompts as Lumina-mGPT's release writes them."""
    ids = chameleon.IDS
    rows, columns = (pixels // 4 for pixels in size)
    begin = [ids[chameleon.BEGIN]]
    begin += [ids[f"<reserved{8800 + side // 2:05d}>"] for side in (rows, columns)]
    wish = f"Generate an image of {size[1]}x{size[0]} according to the following prompt:\n"
    asked = [
        [ids["<s>"], *spoken(words, wish + text), ids[chameleon.TURN], *begin] for text in texts
    ]
    kinds = ([chameleon.PICTURE] * columns + [[ids[chameleon.LINE]]]) * rows
    return torch.tensor([guided(model, row, begin, kinds, cfg) for row in asked])


def spoken(words, text):
    return words(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def guided(model, asked, away, kinds, cfg):
    """Greedy tokens after ``asked``, each one of its ``kinds``, led away from ``away``."""
    drawn = []
    for kind in kinds:
        states = [
            model.model(torch.tensor([ids + drawn]), use_cache=False) for ids in (asked, away)
        ]
        told, free = (model.lm_head(x.last_hidden_state[0, -1]) for x in states)
        scores = (free + cfg * (told - free))[kind]
        drawn.append(kind[int(scores.argmax())])
    return drawn


def pixels_of_janus(pipe, out, size, seeds):
    return pipe.transformer.decode_image_tokens(out.tokens)


def pixels_of_emu3(pipe, out, size, seeds):
    closing = torch.nn.functional.pad(out.tokens, (0, 3))
    height, width = (pixels // 4 for pixels in size)
    found = pipe.transformer.decode_image_tokens(image_tokens=closing, height=height, width=width)
    return found.flatten(0, -4).permute(0, 2, 3, 1)


def pixels_of_glm_image(pipe, out, size, seeds):
    """By the whole pipeline of diffusers, from our tokens."""
    painter = diffusers.GlmImagePipeline.from_pretrained(pipe.folder)
    painter.set_progress_bar_config(disable=True)
    height, width = size
    grid = (height // 32, width // 32)
    pictures = []
    for text, row, seed in zip(PROMPTS, out.tokens, seeds, strict=True):
        fine = painter._upsample_token_ids(row[-grid[0] * grid[1] :], *grid)
        given = dict(height=height, width=width, prior_token_ids=fine, generator=seed)
        pictures.append(painter(text, output_type="np", **given, **STEPS).images)
    return 2 * torch.tensor(np.concatenate(pictures)) - 1


def pixels_of_chameleon(pipe, out, size, seeds):
    """By the tokenizer of diffusers whose weights are in the folder, in whatever form."""
    vq = chameleon.vq()
    rows, columns = (pixels // 4 for pixels in size)
    grid = out.tokens.view(len(out.tokens), rows, -1)[..., :columns]
    codes = (grid - chameleon.FIRST) // 2
    latents = vq.quantize.get_codebook_entry(codes.flatten(), (len(grid), rows, columns, 8))
    return vq.decode(latents, force_not_quantize=True).sample.permute(0, 2, 3, 1)


def save_glm_image(folder):
    glm_image.painter(loud(glm_image.model())).save_pretrained(folder)


@dataclass(frozen=True)
class Kind:
    """``drawn(model, tokenizer, texts, size, cfg)`` are the tokens of its own generate, ``pixels``
    those of the class's own decoder in [-1, 1]. ``save`` writes its folder, and ``places`` are its
    positions where they are no plain counts.
    """

    drawn: Any
    pixels: Any
    size: tuple[int, int]
    save: Any
    places: Any = None
    scales: tuple[float, ...] = (1.5, 5.0)  # of guidance

    @property
    def tested(self):
        """A guidance scale to sample by, which the class knows."""
        return SCALE if max(self.scales) > SCALE else 1.0


def saves(model, template=None):
    def save(folder):
        model().save_pretrained(folder)
        tokenizer(template).save_pretrained(folder)

    return save


STEPS = dict(num_inference_steps=2, guidance_scale=1.2)
KINDS = {
    "janus": Kind(drawn_by_janus, pixels_of_janus, (12, 12), saves(janus, TEMPLATE)),
    "emu3": Kind(drawn_by_emu3, pixels_of_emu3, (12, 16), saves(emu3)),
    "glm_image": Kind(
        drawn_by_glm_image, pixels_of_glm_image, (96, 64), save_glm_image, glm_image.places, (1.0,)
    ),
    "anole": Kind(drawn_by_chameleon, pixels_of_chameleon, (16, 16), chameleon.save),
    "lumina": Kind(drawn_by_lumina, pixels_of_chameleon, (16, 24), chameleon.save_lumina),
}


def saved(kind, tmp_path_factory):
    """The folder of a model of ``kind``."""
    found = tmp_path_factory.mktemp("pictures")
    kind.save(found)
    return found


def opened(folder, dtype=torch.float32, **options):
    """Its pipeline."""
    found = specmm.ImagePipeline.from_pretrained(folder, torch_dtype=dtype, **options)
    found.set_progress_bar_config(disable=True)
    return found


def sized(kind):
    """The options of a call for its size."""
    return dict(zip(("height", "width"), kind.size, strict=True))


def target_of(pipe, kind, cfg, guidance=Guidance, **changed):
    """With what is ``changed`` of the model's layout."""
    layout = replace(pipe._layout(*kind.size), **changed)
    return PictureTarget(pipe.transformer, pipe.facts, Processor(1.0), guidance(cfg), layout=layout)


def prompt_of(target, pipe, texts, negative=None):
    ids = [pipe._ids(text, target.layout) for text in texts]
    return picture_prompt(target, ids, [pipe._away(row, negative, target.layout) for row in ids])


def reference(target, prompt, row, drawn, kind):
    """Probabilities [V] after ``drawn`` tokens, from forwards without any cache."""
    logits = []
    for one in (prompt, prompt.unconditional)[: target.branches]:
        ids = torch.tensor([one.rows()[row]])
        inputs = target.model.get_input_embeddings()(ids)
        if drawn:
            inputs = torch.cat([inputs, target.embed(torch.tensor([drawn]))], dim=1)
        where = None
        if kind.places is not None:
            where = kind.places(target.model, ids.shape[1], kind.size, len(drawn))
        states = target.model.get_decoder()(
            inputs_embeds=inputs, use_cache=False, position_ids=where
        )
        logits.append(target.head(states.last_hidden_state[0, -1]))
    mixed = logits[-1] + target.guidance.scale * (logits[0] - logits[-1])
    mask = target.allowed.at(torch.tensor(len(drawn)))
    return mixed.masked_fill(~mask, float("-inf")).softmax(-1)


def pictures_of(target):
    """The picture tokens that may come first."""
    return target.allowed.at(torch.tensor(0)).nonzero()[:, 0].tolist()
