"""Which causal language models may be targets: those whose trees score as their own forwards do."""

import pytest
import torch
import transformers as tf

from specmm.core.processors import Processor
from specmm.hf.models import probe
from specmm.hf.models.families import AfterHead, after_head
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from tests.generating import as_generate
from tests.tiny import parts

SIZES = parts.SIZES | dict(vocab_size=60)
SHORT = parts.IDS | dict(max_position_embeddings=64, num_key_value_heads=2)
IDS = torch.tensor([[7, 8, 9, 12, 14, 9]])


def made(name, model="ForCausalLM", **config):
    torch.manual_seed(0)
    found = getattr(tf, f"{name}{model}")(getattr(tf, f"{name}Config")(**config))
    return parts.ending(parts.shaken(found))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", {}),
        ("Gemma2", dict(head_dim=8, final_logit_softcapping=2.0)),
        ("Granite", dict(logits_scaling=8.0)),
        ("Cohere", dict(logit_scale=0.25)),
        ("HyperCLOVAX", dict(logits_scaling=0.25)),  # multiplies by what Granite divides by
    ],
)
@torch.no_grad()
def test_the_distribution_is_the_class_s_own(name, config):
    """Some classes scale or cap their logits after the head."""
    model = made(name, **SIZES, **SHORT, **config)
    found = (
        VLMTarget(model, Processor(1.0)).prefill(VLMPrompt({"input_ids": IDS}, 4), 2).probs[0, 0]
    )
    torch.testing.assert_close(found, model(IDS).logits[0, -1].softmax(-1), atol=1e-5, rtol=1e-4)


SCALED = {
    "granite": dict(logits_scaling=8.0),
    "granitemoe": dict(logits_scaling=8.0, num_local_experts=4, num_experts_per_tok=2),
    "cohere": dict(logit_scale=0.25),
    "gemma2": dict(head_dim=8, final_logit_softcapping=2.0),
}
VISION = dict(
    model_type="clip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=2
)
VISION |= dict(num_attention_heads=2, image_size=8, patch_size=4)


def seeing(text, kind=tf.LlavaForConditionalGeneration, **extra):
    config = dict(model_type=text, **SIZES, **SHORT, **extra)
    torch.manual_seed(0)
    model = kind(
        kind.config_class(vision_config=VISION, text_config=config, image_token_index=59)
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.25)
    return model


@pytest.mark.parametrize(
    "kind", [tf.LlavaForConditionalGeneration, tf.LlavaNextForConditionalGeneration]
)
@pytest.mark.parametrize("text", SCALED)
@torch.no_grad()
def test_a_language_model_s_factor_is_not_the_vision_model_s(kind, text):
    """LLaVA's classes leave logits as they are, whatever its language model's config says."""
    model = seeing(text, kind, **SCALED[text])
    found = (
        VLMTarget(model, Processor(1.0)).prefill(VLMPrompt({"input_ids": IDS}, 4), 2).probs[0, 0]
    )
    wanted = model(input_ids=IDS).logits[0, -1].softmax(-1)
    assert 0.5 * (found - wanted).abs().sum() < 1e-5


class Rounded(tf.LlavaForConditionalGeneration):
    """Hands out logits that cannot hold the largest numbers."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = (output.logits / 4).half()
        return output


def test_what_is_done_after_the_head_is_measured_in_half_precision():
    assert after_head(seeing("llama", Rounded)) == AfterHead(0.25, None)


def test_a_model_of_nearly_even_scores_is_compared_before_rounding(monkeypatch):
    """Log-probabilities lie further apart in bfloat16 than the likelihoods of such a model."""
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, **SHORT)).eval().bfloat16()
    distances = []
    measure = probe._distance

    def measured(found, wanted):
        distances.append(measure(found, wanted))
        return distances[-1]

    monkeypatch.setattr(probe, "_distance", measured)
    VLMTarget(model, Processor(1.0))
    assert distances and max(distances) < probe.ROUNDED / 5  # 0.002 with AVX2, 0.024 if rounded


class Hiding(tf.LlavaForConditionalGeneration):
    """As Chameleon, which answers without the tokens of pictures."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits[..., [3, 5]] = torch.finfo(output.logits.dtype).min
        return output


@torch.no_grad()
def test_tokens_that_a_class_hides_are_hidden():
    """From those of its head that a drafter of fewer tokens scores, too."""
    model = seeing("llama", Hiding)
    assert after_head(model) == AfterHead(1.0, None, (3, 5))
    target = VLMTarget(model, Processor(1.0))
    found = target.prefill(VLMPrompt({"input_ids": IDS}, 4), 2)
    wanted = model(input_ids=IDS).logits[0, -1].softmax(-1)
    assert float(found.probs[0, 0, [3, 5]].sum()) == 0
    assert 0.5 * (found.probs[0, 0] - wanted).abs().sum() < 1e-5
    ids = torch.tensor([5, 7, 3, 1])
    few = target.family.logits_of(ids)(found.hidden)
    assert torch.equal(few.softmax(-1) > 0, torch.tensor([[[False, True, False, True]]]))
    everything = target.family.all_logits(found.hidden)
    torch.testing.assert_close(few[..., [1, 3]], everything[..., [7, 1]])
    assert float(everything[..., [3, 5]].min()) > -100


class Squared(tf.LlavaForConditionalGeneration):
    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits.square()
        return output


class Masked(tf.LlavaForConditionalGeneration):
    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits[..., 3] = -100.0
        return output


class Apart(tf.LlavaForConditionalGeneration):
    def forward(self, input_ids, **inputs):
        apart = 3 * torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, position_ids=apart, **inputs)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (Squared, "its logits change after the head in other ways"),
        (Masked, "its logits change after the head in other ways"),
        (Apart, "differ from its own by"),
    ],
)
def test_a_vision_model_that_does_otherwise_is_refused(kind, fault):
    said = rf"model type 'llava' cannot be accelerated here: .*{fault}.*own generate"
    with pytest.raises(ValueError, match=said):
        target = VLMTarget(seeing("llama", kind), Processor())
        target.prefill(VLMPrompt({"input_ids": IDS}, 4), 2)  # pictures may be read otherwise


def test_an_interrupted_probe_has_not_passed():
    model = made("Bert", "LMHeadModel", **SIZES, is_decoder=True)
    handle = model.base_model.register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        VLMTarget(model, Processor())
    handle.remove()
    with pytest.raises(ValueError, match="cannot be accelerated"):
        VLMTarget(model, Processor())


def test_positions_may_be_said_by_the_text_config():
    text = dict(**SIZES, **SHORT, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    quantizer = dict(
        codebook_size=8, embed_dim=4, latent_channels=4, base_channels=32, num_res_blocks=1
    )
    quantizer |= dict(channel_multiplier=[1, 1], attn_resolutions=[], double_latent=False)
    config = dict(text_config=text, vq_config=quantizer, vocabulary_map={"<image>": 59})
    model = made("Emu3", "ForConditionalGeneration", **config)
    assert as_generate(model, IDS, 8)


@pytest.mark.parametrize(
    ("name", "model", "config"),
    [
        ("Bert", "LMHeadModel", SIZES | dict(is_decoder=True)),  # layers between decoder and head
        ("Bloom", "ForCausalLM", dict(vocab_size=60, hidden_size=32, n_layer=2, n_head=4)),  # alibi
        (
            "GPTNeo",
            "ForCausalLM",
            dict(
                vocab_size=60,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
            ),
        ),
    ],
)
def test_others_are_refused_by_name(name, model, config):
    with pytest.raises(ValueError, match=r"model type .* cannot be accelerated"):
        VLMTarget(made(name, model, **config), Processor())


def test_a_model_of_no_numbers_is_left_to_its_user():
    model = made("Llama", **SIZES, **SHORT)
    model.lm_head.weight.data.fill_(float("nan"))
    VLMTarget(model, Processor())


def test_longrope_does_not_cross_its_turning_point():
    rope = dict(
        rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, rope_theta=10000.0
    )
    rope |= dict(original_max_position_embeddings=12, factor=4.0)
    model = made(
        "Phi3", **SIZES, **SHORT, original_max_position_embeddings=12, rope_parameters=rope
    )
    for count, ids in ((6, IDS), (6, IDS.repeat(1, 3))):  # below and above it
        assert as_generate(model, ids, count)
    with pytest.raises(ValueError, match=r"first 12 positions of .* got 16 positions"):
        as_generate(model, IDS, 10)


def test_a_drafter_with_learnt_positions_serves_to_the_last_one():
    sizes = dict(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    model, small = made("GPT2", "LMHeadModel", **sizes), made("GPT2", "LMHeadModel", **sizes)
    assert as_generate(model, IDS, 10, small, "text-draft")


def test_short_rows_are_padded_with_the_end_where_nothing_is_named():
    model, ids = made("Llama", **SIZES, **SHORT), torch.cat([IDS, IDS.flip(1)])
    model.generation_config.pad_token_id = None
    first = model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1]
    model.generation_config.eos_token_id = int(first)
    assert as_generate(model, ids, 8)
