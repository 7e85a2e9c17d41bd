"""What method ``mtp`` draws at temperature 1: the recorded distributions are the layers' own, and
texts follow the target's distribution; broken twins are found out.

Shape letters: V vocabulary.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache

from specmm import methods
from specmm.hf.drafters.drafting import assemble
from specmm.hf.drafters.mtp import MtpDrafter
from specmm.hf.drafters.mtp_layers import layers_of
from specmm.hf.loading.pretrained import load_model
from specmm.hf.models.target import VLMTarget
from tests.cases import some
from tests.integration.two_drafts import (
    EVERY,
    PROCESSOR,
    PROMPT,
    ROOT,
    V,
    check_every_draw,
    colder,
    follows,
    recorded_tables,
)
from tests.tiny.mtp_models import save


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two layers in turn, of which the second reads the first one's predictions, or, MiMo's, the
    target's own states; experts come in float32 at most.
    """
    folders = {name: tmp_path_factory.mktemp(name) for name in ("deepseek", "mimo")}
    return {
        name: load_model(AutoModelForCausalLM, save(name, folder, 2, vocab_size=V))
        for name, folder in folders.items()
    }


@torch.inference_mode()
def drafter_tables(model):
    """What the layers say after the root [1, V] and after each draft [V, V], by transformers."""
    mtp = layers_of(model).model
    chained = model.config.model_type != "mimo_v2_flash"
    first, second = [], []
    for draft in range(V):
        ids = torch.tensor([[*PROMPT, ROOT, draft]])
        read = model.model(ids[:, :-2]).last_hidden_state
        places = torch.arange(len(PROMPT))[None]
        cache = MtpCache(config=mtp.config)
        found = []
        for k in range(2):
            given = ids[:, k + 1 : len(PROMPT) + k + 1]
            states = mtp.forward_layer(k, read, places + k + 1, cache, input_ids=given)
            read = states if chained else read
            found.append(PROCESSOR(model.lm_head(states[0, -1]).double()))
        first.append(found[0])
        second.append(found[1])
    return torch.stack(first[:1]), torch.stack(second)


def every(model):
    """A drafter of every first draft, and one after each."""
    return MtpDrafter(layers_of(model), VLMTarget(model, PROCESSOR), EVERY)


@pytest.mark.parametrize("name", ["deepseek", "mimo"])
def test_recorded_distributions_are_the_layers_own(models, name):
    drafter = every(models[name])
    for found, wanted in zip(recorded_tables(drafter), drafter_tables(models[name]), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("deepseek", (1, 1)), ("deepseek", (2, 1)), ("deepseek", (2, 2)), ("mimo", (2, 2))],
)
def test_every_draw_together_is_the_targets_distribution(models, name, shape):
    check_every_draw(models[name], every(models[name]), shape)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(
    ("name", "tree"),
    some(
        [("deepseek", "chain(3)"), ("deepseek", (2, 1)), ("mimo", (2, 1))], [("deepseek", (2, 1))]
    ),
)
def test_samples_follow_the_targets_distribution(models, name, tree, broken):
    model = models[name]
    late, rule = assemble(methods.MTP(tree=tree), VLMTarget(model, PROCESSOR))
    drafter = late.inner  # begun at once: texts are short
    if broken:
        colder(drafter)
    assert follows(model, drafter, rule) == (not broken)
