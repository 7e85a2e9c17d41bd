"""The comparison with transformers' assisted generation: its settings and its arithmetic."""

import pytest
import transformers as tf

from benchmarks import assisted
from benchmarks.language_speed import Runner


def runner(name, seconds):
    return Runner(name, lambda asked: None, list(seconds))


def test_ratios_are_to_the_fastest_of_theirs_and_to_plain_decoding():
    fast = runner(f"{assisted.ASSISTED} (default)", [3.0, 3.0, 6.0])
    slow = runner(f"{assisted.ASSISTED} (num_assistant_tokens=1)", [9.0, 9.0, 9.0])
    plain = runner("ar", [2.0, 2.0, 4.0])
    ours = runner("mtp", [1.0, 2.0, 2.0])
    runners = [runner("transformers generate", [9.0] * 3), plain, ours, fast, slow]
    found = assisted.compared(ours, runners)
    assert found["over_theirs"] == 1.5 and found["over_plain"] == 1.0
    assert (found["over_theirs_low"], found["over_theirs_high"]) == (2.25, 3.0)
    assert "over_theirs" not in assisted.compared(ours, runners[:3])


def test_transformers_is_tried_by_default_and_with_each_number_of_tokens():
    found = assisted.counted({"assistant_model": None}, None)
    assert found[0].name == f"{assisted.ASSISTED} (default)"
    assert len({one.name for one in found}) == len(found) == 1 + len(assisted.TOKENS)


def test_settings_of_drafting_are_put_back():
    config = tf.LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=8)
    model = tf.LlamaForCausalLM(config)
    before = model.generation_config.num_assistant_tokens
    with pytest.raises(RuntimeError), assisted.drafting(model, {"num_assistant_tokens": 3}):
        assert model.generation_config.num_assistant_tokens == 3
        raise RuntimeError
    assert model.generation_config.num_assistant_tokens == before
