"""``model.generate(…, custom_generate=specmm.custom_generate(…))``: processors, criteria,
streamers, batches.
"""

from threading import Thread

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import specmm
from specmm import methods
from specmm.autotune import Plan
from specmm.hf.drafting import choose, planned_by
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.recipes.training.dflash import build_block
from specmm.recipes.training.msd import msd_config
from specmm.tree import TreeShape
from specmm.vlm.msd import MSDHead

IMAGE = 36
TEXT = dict(
    model_type="llama",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CLIP = dict(
    model_type="clip_vision_model",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=8,
    patch_size=4,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = tf.LlavaConfig(
        vision_config=CLIP, text_config=TEXT, image_token_index=IMAGE, image_seq_length=4
    )
    model = tf.LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model


def msd_of(model):
    torch.manual_seed(1)
    head = MSDHead(msd_config(VLMTarget(model, Processor(0.0)))).eval()
    head.acceptance = {0.0: ((0.9,), (0.9,))}
    return head


@pytest.fixture
def inputs():
    rows = [[1, 5, 36, 36, 36, 36, 6, 7], [0, 0, 0, 1, 9, 10, 11, 9]]
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "pixel_values": pixels}


def first_row(inputs):
    return {k: v[:1] for k, v in inputs.items()}


class Enough(StoppingCriteria):
    """Ends a row when it holds a token twice after the prompt."""

    def __call__(self, input_ids, scores, **kwargs):
        new = input_ids[:, 8:].tolist()
        return torch.tensor([len(row) != len(set(row)) for row in new])


class NotTwice(tf.LogitsProcessor):
    """Forbids the last token."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


OPTIONS = {
    "plain": {},
    "penalties": dict(repetition_penalty=1.4, no_repeat_ngram_size=2, min_new_tokens=9),
    "own processor": dict(logits_processor=LogitsProcessorList([NotTwice()])),
    "allowed tokens": dict(
        prefix_allowed_tokens_fn=lambda row, ids: [3 + row, 7, 9 + int(ids[-1]) % 5]
    ),
    "own criteria": dict(stopping_criteria=StoppingCriteriaList([Enough()])),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_greedy_generate_is_the_same(model, inputs, method, options):
    alone = model.generate(**first_row(inputs), max_new_tokens=16, do_sample=False, **options)
    fn = specmm.custom_generate(method=method)
    assert torch.equal(
        model.generate(
            **first_row(inputs), max_new_tokens=16, do_sample=False, custom_generate=fn, **options
        ),
        alone,
    )
    both = model.generate(**inputs, max_new_tokens=16, do_sample=False, **options)
    ours = model.generate(
        **inputs, max_new_tokens=16, do_sample=False, custom_generate=fn, **options
    )
    assert torch.equal(ours, both)


class Fifth(StoppingCriteria):
    """Ends a row at every token that 5 divides."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 5 == 0


@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_without_an_end_token_rows_go_on_until_the_last_ends(model, inputs, method):
    options = dict(max_new_tokens=16, do_sample=False, eos_token_id=None)
    options["stopping_criteria"] = StoppingCriteriaList([Fifth()])
    wanted = model.generate(**inputs, **options)[:, 8:]
    first = (wanted % 5 == 0).int().argmax(1)
    assert wanted.shape[1] < 16 and len(set(first.tolist())) == 2  # one row ends, the other later
    fn = specmm.custom_generate(method=method)
    assert torch.equal(model.generate(**inputs, **options, custom_generate=fn)[:, 8:], wanted)


def test_sampling_follows_the_warpers_and_the_generator(model, inputs):
    def sample(seed):
        fn = specmm.custom_generate(generator=torch.Generator().manual_seed(seed))
        return model.generate(
            **inputs, max_new_tokens=12, do_sample=True, top_k=2, custom_generate=fn
        )

    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))


def test_a_streamer_hears_every_token(model, inputs):
    class Streamer:
        def __init__(self):
            self.heard, self.ended = [], False

        def put(self, value):
            self.heard += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Streamer()
    fn = specmm.custom_generate(streamer=streamer)
    out = model.generate(
        **first_row(inputs), max_new_tokens=10, do_sample=False, custom_generate=fn
    )
    assert streamer.heard == out[0].tolist()  # the prompt first, as generate has it
    assert streamer.ended
    with pytest.raises(ValueError, match="one answer at a time"):
        model.generate(**inputs, max_new_tokens=4, do_sample=False, custom_generate=fn)


@pytest.fixture
def text():
    """A tiny text model that never ends, and its words."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    made = tf.LlamaForCausalLM(
        tf.LlamaConfig(**{k: v for k, v in TEXT.items() if k != "model_type"})
    ).eval()
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made, tf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


def heard(made, words, **options):
    """What a waiting reader hears, what generate returns or raises."""
    streamer = tf.TextIteratorStreamer(words, skip_prompt=True, timeout=20)
    got = []

    def run():
        try:
            got.append(made.generate(torch.tensor([[5, 6, 7, 5, 6]]), streamer=streamer, **options))
        except ValueError as error:
            got.append(error)

    thread = Thread(target=run)
    thread.start()
    said = "".join(streamer)  # raises when nothing is heard in time
    thread.join()
    return said, got[0]


@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_a_streamer_given_to_generate_hears_the_answer_and_its_end(text, method):
    made, words = text
    options = dict(max_new_tokens=12, do_sample=False)
    wanted, _ = heard(made, words, **options)
    said, out = heard(made, words, custom_generate=specmm.custom_generate(method=method), **options)
    assert said == wanted == words.decode(out[0, 5:])


def test_a_streamer_hears_the_end_of_what_fails(text):
    made, words = text
    fn, options = specmm.custom_generate(), dict(max_new_tokens=300, do_sample=False)
    said, error = heard(
        made, words, custom_generate=fn, **options
    )  # more than the model's positions
    assert said == "" and "max_new_tokens" in str(error)
    twice = specmm.custom_generate(streamer=tf.TextIteratorStreamer(words))
    said, error = heard(made, words, custom_generate=twice, **options)
    assert said == "" and "streamer must be given once" in str(error)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"assistant_model": ...}, r"assistant_model must be off, .*assisted.*method='text-draft'"),
        (
            {"prompt_lookup_num_tokens": 3},
            r"prompt_lookup_num_tokens must be off, .*method='prompt-lookup'",
        ),
        ({"use_mtp": True}, "use_mtp must be off"),
        ({"assistant_early_exit": 1}, "assistant_early_exit must be off"),
        (
            {"penalty_alpha": 0.6, "top_k": 4},
            "penalty_alpha must be off, .*contrastive_search.*without",
        ),
        ({"dola_layers": "high"}, "dola_layers must be off, .*dola_generation.*without"),
    ],
)
def test_what_makes_generate_decode_otherwise_is_refused(text, options, sentence):
    made, fn = text[0], specmm.custom_generate()
    given = {k: made if v is ... else v for k, v in options.items()}
    with pytest.raises(ValueError, match=sentence):
        made.generate(
            torch.tensor([[5, 6, 7]]),
            max_new_tokens=4,
            do_sample=False,
            custom_generate=fn,
            **given,
        )


def test_embeddings_in_place_of_ids_are_refused(text):
    made, fn = text[0], specmm.custom_generate()
    embeds = made.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
    for ids in ({}, {"input_ids": torch.tensor([[5, 6, 7]])}):
        with pytest.raises(ValueError, match="prompts must be input_ids, got inputs_embeds"):
            made.generate(
                inputs_embeds=embeds, **ids, max_new_tokens=4, do_sample=False, custom_generate=fn
            )


def test_msd_drafts_for_a_model_without_pictures(text):
    made, ids = text[0], torch.tensor([[5, 6, 7, 5, 6], [0, 0, 9, 8, 7]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    wanted = made.generate(**inputs, max_new_tokens=12, do_sample=False)
    fn = specmm.custom_generate(msd_of(made), "msd")
    assert torch.equal(
        made.generate(**inputs, max_new_tokens=12, do_sample=False, custom_generate=fn), wanted
    )


def test_beams_and_guidance_are_refused(model, inputs):
    fn = specmm.custom_generate()
    with pytest.raises(ValueError, match="num_beams must be 1"):
        model.generate(**inputs, max_new_tokens=4, num_beams=2, custom_generate=fn)
    with pytest.raises(ValueError, match="guidance_scale must be 1"):
        model.generate(
            **inputs, max_new_tokens=4, do_sample=False, custom_generate=fn, guidance_scale=2.0
        )


def test_the_output_may_be_a_dictionary(model, inputs):
    fn = specmm.custom_generate()
    kept = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    wanted = model.generate(**inputs, **kept).sequences
    assert torch.equal(model.generate(**inputs, **kept, custom_generate=fn).sequences, wanted)


@pytest.mark.parametrize(
    "name", ["output_scores", "output_logits", "output_attentions", "output_hidden_states"]
)
def test_what_a_dictionary_cannot_hold_is_refused(model, inputs, name):
    fn, asked = specmm.custom_generate(), {"max_new_tokens": 4, "do_sample": False, name: True}
    with pytest.raises(ValueError, match=f"{name} must be off, got True"):
        model.generate(**inputs, **asked, return_dict_in_generate=True, custom_generate=fn)
    wanted = model.generate(**inputs, **asked)  # without a dictionary generate leaves it out, too
    assert torch.equal(model.generate(**inputs, **asked, custom_generate=fn), wanted)


@pytest.mark.parametrize("kind", ["msd", "block"])
def test_auto_plans_for_the_drafter_and_changes_nothing(model, inputs, kind):
    drafter = (
        build_block(VLMTarget(model, Processor(0.0)), 1, 4, 39, read=1)
        if kind == "block"
        else msd_of(model)
    )
    fn = specmm.custom_generate(drafter, "auto")
    options = dict(max_new_tokens=12, do_sample=False, no_repeat_ngram_size=2)
    wanted = model.generate(**first_row(inputs), **options)
    for _ in range(2):  # the second call goes by what the first one planned
        assert torch.equal(
            model.generate(**first_row(inputs), custom_generate=fn, **options), wanted
        )


def test_auto_wants_a_drafter_that_can_be_planned_with():
    with pytest.raises(ValueError, match="MSD, EAGLE-3, DEER or block drafter, got none"):
        specmm.custom_generate(method="auto")


def test_auto_uses_the_plan(model, inputs):
    """A drafter as good as the target itself, and far cheaper than the clock says: drafts are
    taken.
    """
    plans = {(1, True, torch.get_num_threads()): Plan(TreeShape.chain(2), 2.0, 2.0, "made up")}
    target = VLMTarget(model, Processor(0.0))
    prompt = VLMPrompt(first_row(inputs), 8)
    assert choose(target, msd_of(model), prompt, plans, planned_by(msd_of(model))) == methods.MSD(
        sampled=True, tree=(-1, 0, 1)
    )
    block = build_block(target, 1, 4, 39, read=1)
    kept = {("block", *key): plan for key, plan in plans.items()}
    assert choose(target, block, prompt, kept, planned_by(block)) == methods.Block(length=2)
