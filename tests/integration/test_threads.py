"""One pipeline serves several threads: each gets the tokens of calls one after the other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

import specmm
from specmm import methods
from tests.integration.test_text_pipeline import DRAFTING

PROMPTS = ("def add(a, b):\n    return a + b", "x", "    return a + b + a")
LONG = 20


def at_once(jobs):
    """What all ``jobs`` return, each run in a thread of its own."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [found.result() for found in [pool.submit(job) for job in jobs]]


def test_text_of_all_methods_at_once(text_pipe):
    def job(method, prompt, sampled):
        options = dict(method=method, max_new_tokens=LONG, temperature=float(sampled), seed=3)
        return lambda: text_pipe(prompt, **options).tokens[0].tolist()

    kinds = [*DRAFTING, "ar", "block", "block"]
    jobs = [job(kind, PROMPTS[i % 3], i % 2) for i, kind in enumerate(kinds)]
    wanted = [one() for one in jobs]
    assert at_once(jobs) == wanted


def test_streams_of_several_threads_and_of_one(text_pipe):
    kinds = ["block", "deer", "block"]
    wanted = [
        text_pipe(p, method=m, max_new_tokens=LONG).texts
        for p, m in zip(PROMPTS, kinds, strict=True)
    ]

    def stream(prompt, method):
        return text_pipe.stream(prompt, method=method, max_new_tokens=LONG)

    def joined(pieces):
        return ["".join(piece for (piece,) in pieces)]

    jobs = [lambda p=p, m=m: joined(stream(p, m)) for p, m in zip(PROMPTS, kinds, strict=True)]
    assert at_once(jobs) == wanted
    first = stream(PROMPTS[0], "block")
    begin = next(first)
    # a stream under way holds nobody up
    nested = text_pipe(PROMPTS[1], method="deer", max_new_tokens=LONG)
    assert nested.texts == wanted[1]
    assert at_once([lambda: begin + joined(first), lambda: joined(stream(PROMPTS[2], "block"))])[
        0
    ] == [begin[0], wanted[0][0].removeprefix(begin[0])]


def test_a_call_that_raises_leaves_the_pipeline_to_others(text_pipe):
    with pytest.raises(ValueError, match="prompt must not be empty"):
        text_pipe("", method="block")
    assert at_once([lambda: text_pipe("x", method="block", max_new_tokens=2).texts])


def test_inside_generate(text_pipe):
    how = specmm.custom_generate(text_pipe.drafter("block"), "block")

    def job(prompt):
        ids = text_pipe.tokenizer(prompt, return_tensors="pt")
        return lambda: text_pipe.model.generate(
            **ids, custom_generate=how, max_new_tokens=LONG
        ).tolist()

    jobs = [job(prompt) for prompt in PROMPTS * 2]
    wanted = [one() for one in jobs]
    assert at_once(jobs) == wanted


def test_questions_of_all_methods_at_once(llava_pipe):
    def job(method, question):
        options = dict(method=method, max_new_tokens=8)
        return lambda: llava_pipe(Image.new("RGB", (64, 64), "red"), question, **options).answers

    kinds = ["msd", "prompt-lookup", "msd", "ar", "text-draft", "msd"]
    questions = [
        "What is a heart?",
        "Why?",
        "How many hearts and bags are there, and which is the larger one?",
    ]
    jobs = [job(kind, questions[i % 3]) for i, kind in enumerate(kinds)]
    wanted = [one() for one in jobs]
    assert at_once(jobs) == wanted


def test_pictures_of_all_methods_at_once(make_tiny):
    pipe = make_tiny(tokens=16)

    def job(method, name):
        options = dict(method=method, output_type="latent")
        return lambda: pipe(
            [name], generator=torch.Generator().manual_seed(1), **options
        ).tokens.tolist()

    kinds = ["ar", "sjd", "eagle", methods.LanternPP(k=10), "speculative"]
    jobs = [job(kind, name) for kind, name in zip(kinds, ["heart", "time"] * 3, strict=False)]
    wanted = [one() for one in jobs]
    assert at_once(jobs) == wanted
