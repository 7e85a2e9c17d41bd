"""Seconds a token of answers of text and pictures in turn (``draw=True``), against plain decoding.

    python -m benchmarks.interleaved

No small model that writes both is published, so this one is random: a Chameleon of 8 layers, 256
wide, with pictures of 12 x 12 tokens. What a round costs beside a step is then measured, and with
it how many tokens a round must bring to gain (``round_over_step``); how many it brings (tau) is
that of random weights, which are fond of what begins a picture. An answer has room for one picture
among words. Only tokens are timed: pixels cost all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import transformers
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from benchmarks.arithmetic import paired_speedup
from benchmarks.common import RESULTS, Out, Row, Threads, environment, label, write_results
from benchmarks.vlm_speed import Answer, Answered, Runner, race, row
from specmm import VQAPipeline, methods

SIDE, CODES = 12, 1024  # tokens of a picture's sides, codes
BEGIN = "<racm3:break>"
SPECIAL = ["<pad>", "<s>", "</s>", "<image>", BEGIN, "<eoss>", "<unk>", "<reserved08706>"]
WORDS = ["a", "red", "blue", "barn", "tree", "on", "hill"]
IDS = {name: i for i, name in enumerate([*SPECIAL, *WORDS])}
SPOKEN = 34  # tokens beside the picture's, with what begins and ends it
PROMPTS = ("a red barn", "blue tree on a hill", "a blue hill")
CONTENDERS: tuple[Any, ...] = (
    methods.AR(),
    methods.PromptLookup(),
    methods.AnswerSJD(),
    methods.AnswerSJD(window=15),
)


@dataclass(frozen=True)
class Asked:
    """A question and its seed."""

    text: str
    seed: int


def writer() -> VQAPipeline:
    """The random model and its processor."""
    torch.manual_seed(0)
    names = {f"IMGIMG{_letters(code)}Z": len(IDS) + code for code in range(CODES)}
    vq = dict(embed_dim=32, num_embeddings=CODES, latent_channels=32, num_res_blocks=1)
    vq |= dict(resolution=4 * SIDE, base_channels=32, channel_multiplier=[1, 1, 1])
    config = transformers.ChameleonConfig(
        vocab_size=len(IDS) + CODES,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        vocabulary_map=IDS | names,
        vq_config=vq,
        eos_token_id=None,
    )
    model = transformers.ChameleonForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in (*model.model.layers.parameters(), model.lm_head.weight):
            if weight.ndim > 1:  # so that the next token depends on those before
                weight.normal_(0, 0.08)
        model.lm_head.weight[IDS[BEGIN]] *= 8
    return VQAPipeline(model, _processor(), name="random Chameleon")


def _letters(code: int) -> str:
    """Digits are letters in Chameleon's vocabulary."""
    return "".join(chr(ord("A") + int(digit)) for digit in str(code))


def _processor() -> Any:
    tokens = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", unk_token="<unk>", pad_token="<pad>"
    )
    marks = [name for name in SPECIAL if name.startswith("<")]
    words.add_special_tokens({"additional_special_tokens": marks, "sep_token": SPECIAL[-1]})
    square = dict(height=4 * SIDE, width=4 * SIDE)
    pictures = transformers.ChameleonImageProcessor(
        size={"shortest_edge": 4 * SIDE}, crop_size=square
    )
    return transformers.ChameleonProcessor(pictures, words, image_seq_length=SIDE**2)


def ours(pipe: VQAPipeline, method: Any, temperature: float) -> Answer:
    """A method of ours, without pixels."""

    def answer(asked: Asked) -> Answered:
        options: dict[str, Any] = dict(method=method, temperature=temperature, seed=asked.seed)
        length = SIDE**2 + SPOKEN
        run = pipe.begin(None, asked.text, max_new_tokens=length, draw=True, **options)
        _, tokens, end = run.finish(None)
        found: list[Tensor] = list(tokens)
        return Answered(found, end.stats, run.certificate(end).kind)

    return answer


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Answers by every contender.")] = 12,
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Write ``interleaved.json`` and ``.csv``: greedy, and at temperature 1."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    pipe = writer()

    def ask(seed: int) -> Asked:
        return Asked(PROMPTS[seed % len(PROMPTS)], seed)

    facts = environment(
        model=pipe.name, dtype="float32", picture=SIDE**2, transformers=transformers.__version__
    )
    rows: list[Row] = []
    for temperature in (0.0, 1.0):
        runners = [Runner(label(m), ours(pipe, m, temperature)) for m in CONTENDERS]
        runners = race(runners, ask, repeats, f"T={temperature:g}")
        plain = runners[0]
        for runner in runners:
            paired = {"speedup": paired_speedup(plain.seconds, runner.seconds)}
            rows.append(row(runner, [plain, plain], "drawn answers", temperature, 1) | paired)
        write_results(out, "interleaved", rows, facts)


if __name__ == "__main__":
    typer.run(main)
