"""The calls that pocket models cannot make: drafters that only tiny random models have, models with
states, models of transformers that draw, rows that begin anew, options of calls, streams.

The models are those of other tests, in double precision. Experts of transformers are float32 at
most; one call is in bfloat16, of a model that is sure of what it says. Their seeds are some with
which AVX2 and AVX-512 agree.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from specmm import ImagePipeline, TextPipeline, VQAPipeline, custom_generate, methods
from specmm.core.decode import decode
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.hf.drafters.drafting import assemble
from specmm.hf.drafters.small_model import SmallModel
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.recipes.msd import build_msd
from tests.golden.calls import Call, Found
from tests.integration.conftest import save_text, tiny_pipeline
from tests.integration.test_hybrids import RAGGED, random_model, text_model
from tests.noisy import noisy
from tests.tiny import assistants, chameleon, mtp_models, picture_kinds, vlm_folders
from tests.tiny.families import Zoo
from tests.unit.vlm.test_eagle3 import head_for

CODE = ["def add(a, b):\n", "x", "    return a + b + a", "sub(a", "return"]
WORDS = ["abc:", "d", "efgh?fe", "hello:", "no"]
SEEDS = [3, 4, 5, 6, 7]
DOUBLE = {"torch_dtype": torch.float64}
DRAWN = {"temperature": 1.0, "seed": SEEDS}
GREEDY = {"temperature": 0.0}
REFILLED = DRAWN | {"batch_size": 2}
HOT = REFILLED | {"temperature": 4.0, "max_new_tokens": 24}  # of models that are sure


@cache
def folder(save: Callable[..., object], *given: Any) -> Path:
    """A folder that ``save`` wrote a model into, until the process ends."""
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # what a model leaves at random is the same in any order of calls
        save(*given, place)
    return place


# ---- texts and answers


@cache
def code() -> TextPipeline:
    return TextPipeline.from_pretrained(folder(save_text), **DOUBLE)


@cache
def deep() -> TextPipeline:
    """A Llama whose layers say less and less."""
    torch.manual_seed(3)
    config = tf.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = tf.LlamaForCausalLM(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
        for layer in model.model.layers[1:]:
            layer.mlp.down_proj.weight.mul_(0.25)
            layer.self_attn.o_proj.weight.mul_(0.25)
    model.generation_config.eos_token_id = None
    return TextPipeline(model, vlm_folders.tokenizer())


@cache
def eagle3(**kind: Any) -> TextPipeline:
    """An untrained head of that model; with a mask token it drafts in parallel."""
    pipe = deep()
    head = head_for(VLMTarget(pipe.model, Processor(0)), tokens=30, layers=(0, 1, 2), **kind)
    return TextPipeline(pipe.model, pipe.tokenizer, "eagle3", head.double())


@cache
def mtp(name: str, count: int, dtype: torch.dtype) -> TextPipeline:
    place = folder(partial(mtp_models.save, count=count), name)
    return TextPipeline.from_pretrained(place, "mtp", torch_dtype=dtype)


@cache
def assistant() -> TextPipeline:
    model = assistants.target(3).double()
    drafter = assistants.assistant_of(model).double()
    return TextPipeline(model, vlm_folders.tokenizer(), "assistant", drafter)


def written(pipe: Callable[[], TextPipeline], prompts: Sequence[str], **options: Any) -> Found:
    return Found.of(pipe()(prompts, **{"max_new_tokens": 14} | options))


def streamed(pipe: Callable[[], TextPipeline], **options: Any) -> Found:
    """What each round added to each text."""
    return Found(list(pipe().stream(CODE[:2], max_new_tokens=14, **options)), {})


@cache
def asked(save: Callable[..., object], *given: Any) -> VQAPipeline:
    return VQAPipeline.from_pretrained(folder(save, *given), **DOUBLE)


def answered(pipe: Callable[[], VQAPipeline], **options: Any) -> Found:
    """Questions about no picture, one and two."""
    pictures = [None, noisy((16, 16), 1), [noisy((24, 16), 2), noisy((16, 16), 3)], None, None]
    return Found.of(pipe()(pictures, WORDS, max_new_tokens=14, **options))


def interleaved(**options: Any) -> Found:
    """Answers of text and pictures in turn."""
    questions = ["blue tree", "tree on a hill", "a red barn"]
    pipe = asked(chameleon.save_writer)
    return Found.of(pipe([None] * 3, questions, max_new_tokens=40, draw=True, **options))


# ---- transformers' generate, and targets by themselves


def generated(model: Any, inputs: dict[str, Any], run: dict[str, Any], **options: Any) -> Found:
    """By ``model.generate(custom_generate=…)``, drawn."""
    generator = [torch.Generator().manual_seed(seed) for seed in range(len(inputs["input_ids"]))]
    found = model.generate(
        **inputs,
        do_sample=True,
        max_new_tokens=14,
        custom_generate=custom_generate(generator=generator, **run),
        **options,
    )
    return Found(found[:, inputs["input_ids"].shape[1] :].tolist(), {})


def of_states(name: str, method: str) -> Found:
    """A model whose layers have states, drafted for by ``method``."""
    model = random_model(name).to(torch.float32 if name == "jamba" else torch.float64)
    drafter = {"text-draft": SmallModel(text_model().double())}.get(method)
    if method == "msd":
        drafter = build_msd(VLMTarget(model, Processor(0)), seed=1).double()
    return generated(model, Zoo().batch("llava", RAGGED), {"drafter": drafter, "method": method})


def of_pictures(**options: Any) -> Found:
    """M-RoPE, rows with pictures anywhere, an MSD head."""
    zoo = Zoo()
    model = zoo.model("qwen2.5-vl").double()
    inputs = zoo.batch("qwen2.5-vl", zoo.rows)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    drafter = build_msd(VLMTarget(model, Processor(0)), seed=1).double()
    return generated(model, inputs, {"drafter": drafter, "method": "msd"}, **options)


def guided(method: Any) -> Found:
    """A text model led away from what it says to nothing."""
    target = VLMTarget(code().model, Processor(1.0), guidance=Guidance(2.0))
    parts = assemble(method, target, SmallModel(code().drafter("text-draft").model))
    away = VLMPrompt(padded([[2]] * len(RAGGED)), 14)
    prompt = VLMPrompt(padded(RAGGED), 14, unconditional=away)
    *_, end = decode(target, *parts, prompt, 14, Uniforms.from_seeds(SEEDS[: len(RAGGED)]))
    return Found(end.tokens[:, :14].tolist(), {"kept": end.stats.kept})


# ---- pictures


@cache
def drawing(kind: str) -> ImagePipeline:
    place = folder(picture_kinds.KINDS[kind].save)
    return picture_kinds.opened(place, torch.float64)


def drawn(kind: str, **options: Any) -> Found:
    """Two pictures of a model of transformers."""
    known = picture_kinds.KINDS[kind]
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    given = {"cfg": known.tested, "output_type": "latent"} | picture_kinds.sized(known) | options
    return Found.of(drawing(kind)(picture_kinds.PROMPTS, generator=generators, **given))


@cache
def llamagen() -> Any:
    found = tiny_pipeline().to(torch.float64)
    found.set_progress_bar_config(disable=True)
    return found


def classes(batch_size: int, **options: Any) -> Found:
    """Seven pictures of classes."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(7)]
    names = ["heart", "time", "country-flag", "heart", "time", "time", "heart"]
    given = {"cfg": 2.0, "output_type": "latent", "batch_size": batch_size} | options
    return Found.of(llamagen()(names, generator=generators, **given))


HEADS: dict[str, Any] = {"eagle3": {}, "p-eagle": {"mask": 3, "deep": 2}}
MTP = {"deepseek": 3, "glm": 1, "mellum": 1, "mimo": 2, "qwen3.5 text": 1}
RECALLING = ("prompt-lookup", "suffix", "recycle")
STATES = [("qwen3_5", m) for m in ("ar", "prompt-lookup", "text-draft", "msd")]
STATES += [("lfm2", "prompt-lookup"), ("lfm2", "msd"), ("jamba", "prompt-lookup")]
STATES += [("lfm2", "suffix"), ("jamba", "recycle")]
DRAWING: dict[str, Any] = {"ar": "ar", "sjd": methods.SJD(window=4)}
OF_CLASSES: dict[str, Any] = DRAWING | {
    "a tree": methods.Speculative(tree=(2, 2, 1)),
    "eagle": methods.Eagle(top_k=4),
    "lantern++": methods.LanternPP(k=3),
    "lantern": "lantern",
    "gsd": "gsd",
}
OF_CODE: dict[str, dict[str, Any]] = {
    **{f"refilled: {method}": REFILLED | {"method": method} for method in ("ar", "block", "deer")},
    **{f"refilled: {method}": REFILLED | {"method": method} for method in RECALLING},
    "stop strings": REFILLED | {"method": "block", "stop": list("dsnr(")},
    "penalty": DRAWN | {"method": "block", "repetition_penalty": 1.3},
    "penalty, prompt-lookup": GREEDY | {"method": "prompt-lookup", "repetition_penalty": 1.3},
    "top k and p": DRAWN | {"method": "text-draft", "top_k": 20, "top_p": 0.9},
}


def texts() -> dict[str, Call]:
    """By pipelines of text, whole and streamed."""
    found: dict[str, Call] = {}
    for label, options in OF_CODE.items():
        found[f"tiny text: {label}"] = partial(written, code, CODE, **options)
    for label, kind in HEADS.items():
        pipe = partial(eagle3, **kind)
        found[f"{label}: dynamic"] = partial(written, pipe, WORDS, **DRAWN)
        found[f"{label}: greedy"] = partial(written, pipe, WORDS, **GREEDY)
        sampled = methods.Eagle3(sampled=True, tree=(6, 2))
        found[f"{label}: drawn"] = partial(written, pipe, WORDS, method=sampled, **REFILLED)
        found[f"{label}: stream"] = partial(streamed, pipe, **GREEDY)
    for name in ("ar", "block", "deer"):
        options = {"method": name, "temperature": 1.0, "seed": [3, 4]}
        found[f"stream: {name}"] = partial(streamed, code, **options)
    return found


def texts_of_other_drafters() -> dict[str, Call]:
    """By the layers that some models bring for drafting, and the assistants of others."""
    found: dict[str, Call] = {}
    for name, count in MTP.items():
        pipe = partial(mtp, name, count, torch.float64 if "qwen" in name else torch.float32)
        found[f"mtp: {name}"] = partial(written, pipe, WORDS, **HOT)
        found[f"mtp, greedy: {name}"] = partial(written, pipe, WORDS, **GREEDY)
    pipe = partial(mtp, "deepseek", 3, torch.float32)
    chosen = HOT | {"method": methods.MTP(sampled=False)}
    found["mtp: dynamic"] = partial(written, pipe, WORDS, **chosen)
    pipe = partial(mtp, "deepseek", 3, torch.bfloat16)
    found["mtp: bfloat16"] = partial(written, pipe, WORDS, **REFILLED)
    if assistants.buildable():
        found["assistant"] = partial(written, assistant, WORDS, **HOT)
        chosen = HOT | {"method": methods.Assistant(sampled=False)}
        found["assistant: dynamic"] = partial(written, assistant, WORDS, **chosen)
    for name, method in STATES:
        found[f"states: {name}, {method}"] = partial(of_states, name, method)
    for method in (methods.PromptLookup(), methods.TextDraft()):
        found[f"guided: {method.name}"] = partial(guided, method)
    return found


def answers() -> dict[str, Call]:
    """Of models that see pictures, and of one that draws some in turn with words."""
    found: dict[str, Call] = {"custom_generate": of_pictures}
    options = {"repetition_penalty": 1.2, "top_k": 12, "no_repeat_ngram_size": 3}
    found["custom_generate: processors"] = partial(of_pictures, **options)
    pipe = partial(asked, mtp_models.save, "qwen3.5")
    found["states: answers, mtp"] = partial(answered, pipe, method="mtp", **REFILLED)
    for name in ("qwen2.5-vl", "gemma3"):
        pipe = partial(asked, vlm_folders.save, name)
        found[f"answers: {name}"] = partial(answered, pipe, method="prompt-lookup", **REFILLED)
    for label, heat in {"drawn": {"temperature": 1.0, "seed": [3, 4, 5]}, "greedy": GREEDY}.items():
        found[f"interleaved, {label}: ar"] = partial(interleaved, method="ar", **heat)
        for method in (methods.PromptLookup(), methods.AnswerSJD(window=5)):
            options = heat | {"method": method, "batch_size": 2}
            found[f"interleaved, {label}: {method.name}"] = partial(interleaved, **options)
    return found


def pictures() -> dict[str, Call]:
    """Of transformers' models, and many of classes."""
    found: dict[str, Call] = {}
    for label, method in DRAWING.items():
        for kind in picture_kinds.KINDS:
            found[f"{kind}: {label}"] = partial(drawn, kind, method=method)
    for label, method in OF_CLASSES.items():
        for size in (2, 7):
            options = {"method": method, "batch_size": size}
            found[f"classes by {size}: {label}"] = partial(classes, **options)
    return found


def calls() -> dict[str, Call]:
    """Every call by its name."""
    return texts() | texts_of_other_drafters() | answers() | pictures()
