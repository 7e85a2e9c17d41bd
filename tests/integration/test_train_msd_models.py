"""MSD drafters learn and draft for models of every kind of attention to pictures: what trains them
is what the model's own processor makes, and greedy answers stay those of ``generate``.
"""

import copy
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from recipes import data
from recipes.scenes.kinds import KINDS
from recipes.scenes.sprites import Sprite, Sprites
from recipes.scenes.stream import World
from specmm import VQAPipeline, custom_generate
from specmm.chats.forms import chat_of
from specmm.chats.tokens import ChatReader
from specmm.core.decode import decode
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.tree import DraftTree
from specmm.hf.drafters.features import FeatureDrafter
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.recipes.msd import read_slots
from specmm.recipes.recipe import train
from specmm.shape.trees import spine
from specmm.verify import Recursive
from specmm.vlm.asking import Questions
from specmm.vlm.loading import load_model
from specmm.vlm.msd import MSDHead, load_for, save_msd
from tests.noisy import noisy
from tests.sampling import fits
from tests.tiny.chats import one_turn
from tests.tiny.vlm_folders import END, save

KINDS_OF_MODELS = ("qwen2.5-vl", "qwen3.5", "gemma3")  # M-RoPE, states, scaled tokens
LENGTH = 20
SETTINGS = dict(steps=41, batch=4, width=32, scenes=2, ramp=20, lr=1e-2)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with a wide picture, a high one and a video of four frames."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, size in (("wide.png", (40, 20)), ("high.png", (24, 40))):
        noisy(size, 60).convert("RGB").save(folder / name)
    first, *others = (noisy((32, 32), 40 * i).convert("RGB") for i in range(1, 5))
    first.save(folder / "clip.gif", save_all=True, append_images=others, duration=100)
    return folder


@pytest.fixture(scope="module")
def lines(pictures):
    """Questions about one picture, about two and about none."""
    shown = ["wide.png", ["wide.png", "high.png"], ["high.png"]]
    rows = [
        dict(question=f"is it {word}?", answer=f"{word} it is", image=shown[i % 3])
        for i, word in enumerate(("red", "blue", "one", "a dog", "a box", "in it"))
    ]
    rows.append({"question": "what is a dog", "answer": "it is a cat"})
    (pictures / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return pictures / "lines.jsonl"


@pytest.fixture(scope="module", params=KINDS_OF_MODELS)
def trained(request, lines, tmp_path_factory):
    """Each kind of model with a drafter that the recipe made."""
    folder = save(request.param, tmp_path_factory.mktemp("model"))
    train("msd", model=folder, data=lines, out=folder / "run", **SETTINGS)
    return folder


@pytest.fixture(scope="module")
def pipe(trained):
    return VQAPipeline.from_pretrained(trained, method="msd", torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def asked(pictures):
    """Of no picture, of one and of two, of different lengths."""
    wide, high = (Image.open(pictures / name) for name in ("wide.png", "high.png"))
    return [None, wide, [wide, high]], ["what is this", "how many", "is it red?"]


@pytest.fixture(scope="module")
def inputs(pipe, asked):
    return Questions.of(*asked).inputs(pipe.processor)


@pytest.fixture(scope="module")
def own(pipe, inputs):
    """What transformers' own generate answers."""
    return pipe.model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)


@pytest.fixture(scope="module")
def wanted(own, inputs):
    """The same up to the first end."""
    rows = [row[inputs["input_ids"].shape[1] :].tolist() for row in own]
    ends = [min([i + 1 for i, t in enumerate(row) if t in (2, END)] or [LENGTH]) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}], ids=["batch", "refilled"])
@pytest.mark.slow
def test_greedy_answers_are_those_of_generate(pipe, asked, wanted, options):
    out = pipe(*asked, max_new_tokens=LENGTH, temperature=0.0, **options)
    assert [ids.tolist() for ids in out.tokens] == wanted
    assert out.stats.tau > 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["msd", "auto"])
def test_inside_generate(pipe, inputs, own, method):
    ours = custom_generate(pipe.drafter("msd"), method=method)
    options = dict(max_new_tokens=LENGTH, do_sample=False, custom_generate=ours)
    assert torch.equal(pipe.model.generate(**inputs, **options), own)


@pytest.mark.slow
def test_the_recipe_learns(trained):
    curve = (trained / "run" / "loss.csv").read_text().splitlines()
    losses = [float(row.split(",")[1]) for row in curve[1:]]
    assert losses[-1] < 0.9 * losses[0]


def own_states(pipe, line, end):
    """By the model's own forward over one whole conversation: the decoder's inputs, its states,
    and where the answer begins.
    """
    asked, said = (m["content"][-1]["text"] for m in line.messages)
    question = Questions.of([list(line.images)], [asked], videos=[list(line.videos)])
    inputs = question.inputs(pipe.processor)
    answer = [*pipe.tokenizer.encode(said, add_special_tokens=False), end]
    start = inputs["input_ids"].shape[1]
    for name, value in inputs.items():
        if value.shape == (1, start):
            new = {"input_ids": answer, "attention_mask": [1] * len(answer)}
            more = torch.tensor([new.get(name, [0] * len(answer))])
            inputs[name] = torch.cat([value, more], dim=1)
    seen = []
    decoder = pipe.model.get_decoder()
    handle = decoder.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        found = pipe.model.model(**inputs, use_cache=False).last_hidden_state
    handle.remove()
    return seen[0][0], found[0], start


def check_slots(pipe, talks):
    """A batch of ``talks`` gives a head what the model's own forward over each of them sees."""
    target = VLMTarget(pipe.model, Processor(1.0))
    target.wants_context = True
    slots = read_slots(target, talks, ChatReader(pipe.processor, [2, END], 512).read)
    for row, line in enumerate(talks):
        inputs, states, start = own_states(pipe, line, END)
        count = len(states) - 1
        answers = torch.arange(count) >= start - 1
        assert slots.mask[row, :count].tolist() == answers.tolist()
        assert not slots.mask[row, count:].any()
        for found, own in (
            (slots.embeddings, inputs[1:]),
            (slots.hidden, states[:-1]),
            (slots.hidden.roll(-1, 1), states[1:]),
        ):
            torch.testing.assert_close(found[row, :count], own, rtol=1e-4, atol=1e-4)


def test_what_trains_a_head_is_what_the_model_itself_sees(pipe, pictures):
    """In a ragged batch, of everything that the processor makes."""
    wide, high = str(pictures / "wide.png"), str(pictures / "high.png")
    lines = [
        one_turn("is it red?", "yes", wide),
        one_turn("what is it", "a dog"),
        one_turn("how many", "two", [high, wide]),
    ]
    check_slots(pipe, lines)


def test_videos(pipe, pictures):
    """They train a head and are drafted after, where the processor takes them."""
    if not hasattr(pipe.processor, "video_processor"):
        pytest.skip("its processor takes no videos")
    clip = str(pictures / "clip.gif")
    check_slots(pipe, [one_turn("what is it", "a dog", None, clip), one_turn("is it?", "yes")])
    asked = dict(videos=clip, max_new_tokens=LENGTH, temperature=0.0)
    drafted, plain = (pipe(None, "is it?", method=m, **asked) for m in ("msd", "ar"))
    assert drafted.tokens[0].tolist() == plain.tokens[0].tolist()


def test_a_loaded_head_reads_tokens_as_the_decoder_does(pipe):
    """Gemma's are scaled after the table that they come from."""
    target = VLMTarget(pipe.model, Processor(1.0))
    head = pipe.drafter("msd")
    ids = torch.arange(head.config.vocab_size)
    assert torch.equal(head.embed_tokens(ids), target.embed(ids))


def test_an_answer_ends_as_the_template_ends_it(pipe):
    words, chat = pipe.tokenizer, one_turn("is it?", "yes")
    silent = copy.copy(pipe.processor)
    silent.tokenizer = copy.copy(words)
    silent.chat_template = silent.tokenizer.chat_template = None
    for processor, ends, wanted in (
        (pipe.processor, [2, END], "yes<unk>"),
        (pipe.processor, [2], "yes</s>"),
        (pipe.processor, [], "yes</s>"),
        (silent, [2, END], "yes</s>"),
    ):
        prompt, answers = ChatReader(processor, ends, 512).read([chat])
        assert words.decode(prompt.input_ids[0][answers[0]]) == wanted
    prompt, _ = ChatReader(pipe.processor, [2, END], 512).read([chat])
    assert words.decode(prompt.input_ids[0]) == "<s>user:is it?assistant:yes<unk>"


def test_pictures_in_several_turns(pipe, pictures):
    """Answers before a later picture are learnt as well, in the tokens that the processor makes."""
    turns = [
        ("user", "is it <image>"),
        ("assistant", "yes"),
        ("user", "<image>or"),
        ("assistant", "no"),
    ]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    row["images"] = ["wide.png", "high.png"]
    reader = ChatReader(pipe.processor, [2, END], 512)
    chat = chat_of(row, pictures)
    prompt, learnt = reader.read([chat, one_turn("is it?", "yes")])
    words = [
        pipe.tokenizer.decode(ids[own]) for ids, own in zip(prompt.input_ids, learnt, strict=True)
    ]
    assert words == ["yes<unk>no<unk>", "yes<unk>"]
    assert reader.check(chat) == int(prompt.lengths[0])


CELLS = 4  # tokens that the filter leaves at each place
PART = 200  # rows of a batch


def own_pairs(pipe, inputs, temperature):
    """The joint distribution [V, V] of the first two tokens, by the model's own forward."""
    size = pipe.model.get_output_embeddings().weight.shape[0]

    def probs(given):
        with torch.no_grad():
            logits = pipe.model(**given, use_cache=False).logits[:, -1].double() / temperature
        kept = logits.topk(CELLS)
        return torch.zeros_like(logits).scatter_(-1, kept.indices, kept.values.softmax(-1))

    def followed(token):
        more = {"input_ids": token, "attention_mask": 1}
        width = inputs["input_ids"].shape[1]
        return {
            name: torch.cat([x, torch.full((1, 1), more.get(name, 0))], 1).to(x.dtype)
            if x.shape == (1, width)
            else x
            for name, x in inputs.items()
        }

    first = probs(inputs)[0]
    return torch.stack(
        [p * probs(followed(t))[0] if p > 0 else torch.zeros(size) for t, p in enumerate(first)]
    )


@pytest.mark.parametrize("broken", [False, True], ids=["exact", "broken twin"])
@pytest.mark.slow
def test_sampling_keeps_the_models_own_distribution(pipe, pictures, broken):
    """Chi-square of the first two of three tokens after a picture; a twin that says its drafts
    were drawn uniformly is found out.
    """
    runs = 1000
    question = Questions.of(Image.open(pictures / "wide.png"), "is it red?")
    alone = question.inputs(pipe.processor)
    joint = own_pairs(pipe, alone, 1.5).flatten()
    target = VLMTarget(pipe.model, Processor(1.5, top_k=CELLS))
    widths = (1, 1) if target.family.chains_only else (2, 1)
    drafter = FeatureDrafter(pipe.drafter("msd"), target, spine(widths))
    if broken:
        propose = drafter.propose
        drafter.propose = lambda *args: mistaken(propose(*args))
    inputs = {name: x.repeat(PART, *[1] * (x.ndim - 1)) for name, x in alone.items()}
    tokens = []
    for seeds in torch.arange(runs).split(PART):
        uniforms = Uniforms.from_seeds(seeds.tolist())
        prompt = VLMPrompt(inputs, 4)
        *_, end = decode(target, drafter, Recursive(), prompt, 3, uniforms)
        tokens.append(end.tokens)
    assert fits(joint, torch.cat(tokens)[:, :2]) != broken


def mistaken(tree):
    return DraftTree(tree.tokens, tree.shape, torch.full_like(tree.probs, 1 / CELLS))


@pytest.mark.slow
def test_scenes_train_any_model(trained, tmp_path, monkeypatch):
    """The pocket models' recipe: a model that did not learn scenes reads them through its own
    processor.
    """
    square = np.full((64, 64, 4), 255, np.uint8)
    sprites = Sprites(
        tuple(Sprite(k.name, colour, square) for k in KINDS for colour in k.icons.values())
    )
    monkeypatch.setattr(data, "load_world", lambda folder, split: World(sprites, ()))
    skip = shutil.ignore_patterns("drafters", "run")
    model = shutil.copytree(trained, tmp_path / "model", ignore=skip)
    options = SETTINGS | dict(steps=2, batch=2, scenes=1, out=tmp_path / "run")
    train("scenes-msd", model=model, data=tmp_path, **options)
    assert load_for(model / "drafters" / "msd", load_model(model, torch.float32), "msd").acceptance


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "drafter must be of this target"),
        ({"hidden_size": 24}, "drafter must have the target's embeddings"),
        ({"vocab_size": 50}, "drafter must have the target's embeddings"),
    ],
)
def test_heads_of_other_targets_are_refused(pipe, changes, message, tmp_path):
    config = dataclasses.replace(pipe.drafter("msd").config, **changes)
    save_msd(MSDHead(config), tmp_path, embeddings=False)
    with pytest.raises(ValueError, match=message) as error:
        load_for(tmp_path, pipe.model, "msd")
    assert "\n" not in str(error.value)
