"""Tests whether and how a transformers model can be a target, by comparing our scores with its own.

Classes differ in the steps after the decoder, in the form of positions and masks, and in what they
cache. A target that gets one of these wrong would give wrong answers without any error. So every
model is tested: for text when a target is made from it, and for each kind of prompt with pictures
when the first such prompt comes. A few tokens and logits of the model's own ``generate`` are
compared with a prefill and a small tree of ours. The ways to run the model are tried in turn until
one agrees.

Models that take only chains (layers with states) are tested with several chains, each accepted in
part: a state that was not reset to the last accepted token gives wrong scores in the next chain.

Shape letters: B batch, N tokens of the trees, T tokens of the model's own, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from specmm.core.derived import fact, facts
from specmm.core.target import Target
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.models.families import WAYS, Family, Way, own_logits, plain_tokens
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.verify.rule import VerifyResult

Trees = Sequence[tuple[tuple[int, ...], int]]  # parents, and how many first nodes are kept
TREE: Trees = (((-1, 0, 0, 1), 0),)
CHAINS: Trees = (((-1, 0, 1, 2), 2), ((-1, 0), 1), ((-1, 0, 1), 0))
SIBLING: Trees = (((-1, 0, 0), 0),)  # a sibling of the token that the model chose, and one after it
LATER: Trees = (((-1, 0), 1), ((-1,), 0))  # the same by chains
PROMPTS = (3, 2)  # tokens of each row before the tree
OWN = 3  # tokens that the model itself answers a prompt with
CLOSE = {torch.float32: 0.001, torch.float64: 0.001}  # relative to the spread of log-probabilities
ROUNDED = 0.03  # the same in half precision
STATES = 0.06  # there, where layers have states
NOISES = 2.0  # largest distance between our scores and the model's own, in units of its noise
NOISIEST = 0.1  # of the range: with more noise than that, nothing can be distinguished
DIFFERING = "differing forwards"
LOGGER = logging.getLogger(__name__)
LEAST = -80.0  # a log-probability whose exponential float32 still distinguishes from 0
DIFFERS = "its scores of a small draft tree differ from its own"
Answer = Way | str  # the way that agrees, or what is wrong
Probing = Callable[[Way], Target]


def check_model(model: PreTrainedModel, target: Probing) -> Way:
    """The way of running ``model`` in which trees of text score as in its own forwards.

    ``target`` makes an unchecked target of the model that samples at temperature 1. Each model is
    tested once; a model whose logits are not finite passes. Raises ``ValueError`` naming the
    model's type if no way agrees, except for models that may read pictures in another way than
    text: these are tested again (see ``way_of``).
    """
    answer = _text(model, target)
    if isinstance(answer, str) and answer.startswith(DIFFERS) and _reads_pictures(model):
        return WAYS[-1]
    return _way(model, answer, "")


def way_of(model: PreTrainedModel, prompt: VLMPrompt, target: Probing) -> Way:
    """The way of running ``model`` in which prompts of this kind score as in ``generate``.

    Each kind of prompt is tested once for each model. Raises ``ValueError`` saying what differs, or
    why the model itself cannot read the prompt.
    """
    long = Family.of(model).room < prompt.width + OWN + 1  # to be asked about
    if not prompt.kind or long:
        return _way(model, _text(model, target), "")

    def find() -> Answer:
        with torch.autocast(model.device.type, enabled=False):
            return _of_prompt(model, prompt, target)

    answer = fact(model, ("probed", prompt.kind), find)
    return _way(model, answer, f" with {', '.join(sorted(prompt.kind))}")


def _text(model: PreTrainedModel, target: Probing) -> Answer:
    def find() -> Answer:
        with torch.autocast(model.device.type, enabled=False):  # a training may be in it
            return _of_text(model, target)

    return fact(model, "probed", find)


def _reads_pictures(model: PreTrainedModel) -> bool:
    return model.config is not model.config.get_text_config()


def _way(model: PreTrainedModel, answer: Answer, where: str) -> Way:
    """The way in ``answer``; raises ``ValueError`` if that is the reason why there is none."""
    if isinstance(answer, Way):
        return answer
    raise ValueError(
        f"model type {model.config.model_type!r} cannot be accelerated here{where}: {answer}; let "
        "transformers' own generate answer"
    )


def _of_text(model: PreTrainedModel, target: Probing) -> Answer:
    """Test text: a small tree, or chains, against the model's own forward."""
    config = model.config.get_text_config()
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "it counts its local window by cache slots"
    family = Family.of(model)
    chains = family.chains_only
    ways = family.ways
    trees = CHAINS if chains else TREE
    nodes = sum(len(parents) for parents, _ in trees)
    if family.room < PROMPTS[0] + nodes:
        return ways[0]
    tokens = plain_tokens(model.config, PROMPTS[0] + nodes)
    drafts = tokens[PROMPTS[0] :].expand(len(PROMPTS), -1)
    otherwise = _prepares_otherwise(model)
    compute_plain = _own_steps if chains or otherwise else _by_model
    try:
        expected = compute_plain(model, tokens, _paths(trees))
    except Exception as error:
        return f"its own forward cannot read text alone ({_brief(error)})"
    rows = padded([tokens[:count].tolist() for count in PROMPTS], model.device)
    prompt = VLMPrompt(rows, 1 + sum(committed for _, committed in trees))

    def found(way: Way) -> Tensor:
        return _ours(target(way), prompt, drafts.to(model.device), trees)[:, 1:]

    answer = _agreeing(family, found, expected)
    if isinstance(answer, str) and otherwise:
        return "its generate adds to the prompt's tokens, as PEFT does with virtual ones"
    return answer


def _of_prompt(model: PreTrainedModel, prompt: VLMPrompt, target: Probing) -> Answer:
    """Test a ``prompt`` with pictures: a sibling tree, or chains, against its own generate."""
    family = Family.of(model)
    try:
        tokens, expected = _generated(model, prompt)  # [B, T], [B, T, V]
    except Exception as error:  # says nothing of other prompts
        raise ValueError(f"the model itself cannot read this prompt: {_brief(error)}") from error
    if bool(expected.isnan().any()):
        raise ValueError("the model's own logits after this prompt must be finite, got NaN")
    sibling = (tokens[:, :1] + 1) % expected.shape[-1]  # a sibling that is not chosen
    drafts = torch.cat([tokens[:, :1], sibling, tokens[:, 1:2]], dim=1)
    ours = VLMPrompt(prompt.inputs, OWN + 1)
    trees = LATER if family.chains_only else SIBLING

    def found(way: Way) -> Tensor:
        return _ours(target(way), ours, drafts, trees)[:, [0, 1, 3]]

    return _agreeing(family, found, expected)


def _prepares_otherwise(model: PreTrainedModel) -> bool:
    """Whether this object prepares generate's inputs by a replaced method, as under PEFT."""
    override = vars(model).get("prepare_inputs_for_generation")
    class_method = getattr(type(model), "prepare_inputs_for_generation", None)
    return override is not None and getattr(override, "__func__", override) is not class_method


def _noise(model: PreTrainedModel) -> float:
    """Distance between two of the model's own forwards, one over a whole text and one token by
    token, as a share of the range of log-probabilities.
    """

    def find() -> float:
        tokens = plain_tokens(model.config, PROMPTS[0] + len(TREE[0][0]))
        try:
            log_probs = (steps(model, tokens, _paths(TREE)) for steps in (_by_model, _own_steps))
            return _distance(*log_probs)
        except Exception as error:  # the model reads no text alone
            _brief(error)
            return 0.0

    return fact(model, "noise", find)


def _agreeing(family: Family, compute: Callable[[Way], Tensor], expected: Tensor) -> Answer:
    """The first of the ``family``'s ways whose log-probabilities are as ``expected``; else the
    nearest way, if it is within the model's own noise; else the reason why no way agrees.
    """
    ways = family.ways
    if not _embeds_alike(family):
        ways = tuple(way for way in ways if way.whole)
    if bool(expected.isnan().any()):
        return ways[0]
    close = CLOSE.get(family.model.dtype, STATES if family.chains_only else ROUNDED)
    faults: list[tuple[float, str, Way]] = []
    for way in ways:
        try:
            off = _distance(compute(way), expected)
        except Exception as error:
            fault = f"its forward fails with a cache that holds draft trees ({_brief(error)})"
            faults.append((float("inf"), fault, way))
            continue
        if off <= close:
            return way
        faults.append((off, f"{DIFFERS} by {off:.1%} of their range", way))
    off, fault, way = min(faults, key=lambda fault: fault[0])
    noise = min(_noise(family.model), NOISIEST) if off < float("inf") else 0.0
    if off <= NOISES * noise:
        LOGGER.warning(
            "%s: two forwards of its own differ by %.1f%% of the range of its scores, as of "
            "quantised activations; its drafted answers are its own up to that",
            family.model.config.model_type,
            100 * noise,
        )
        facts(family.model)[DIFFERING] = {"forwards that differ by": f"{noise:.1%} of their range"}
        return way
    return f"{fault}, its own forwards by {noise:.1%}" if noise > close else fault


def own_noise(model: PreTrainedModel) -> dict[str, str]:
    """For certificates: how much forwards of a checked ``model`` differ, if beyond rounding."""
    differing: dict[str, str] = facts(model).get(DIFFERING, {})
    return differing


def _embeds_alike(family: Family) -> bool:
    """Whether a generated placeholder token reaches the decoder as its own embedding."""
    if not family.image_tokens or family.body is family.decoder:
        return True
    ids = torch.tensor([family.image_tokens], device=family.model.device)
    embedding = family.model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and int(ids.max()) >= embedding.num_embeddings:
        return True  # a GPU that is asked for these computes nothing more
    embedded: list[Tensor] = []

    def see(_: nn.Module, __: object, arguments: dict[str, Any]) -> None:
        embedded.append(arguments["inputs_embeds"])

    handle = family.decoder.register_forward_pre_hook(see, with_kwargs=True)
    try:
        with torch.inference_mode():
            family.body(input_ids=ids, use_cache=False)
            return torch.equal(embedded[0], family.embedding(ids))
    except Exception:  # the model takes no placeholders without pictures
        return True
    finally:
        handle.remove()


def _distance(computed: Tensor, expected: Tensor) -> float:
    """The largest difference of log-probabilities, as a share of their range."""
    expected = expected.clamp(min=LEAST)
    spread = (expected.amax() - expected.amin()).clamp(min=1e-6)
    return float((computed.clamp(min=LEAST) - expected).abs().amax() / spread)


def _brief(error: Exception) -> str:
    """``error`` in one line; out-of-memory errors, which do not concern the model, are raised."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _paths(trees: Trees) -> list[tuple[int, ...]]:
    """The path from the first root to each node; nodes are numbered through all ``trees``."""
    paths: list[tuple[int, ...]] = []
    before: tuple[int, ...] = ()
    for parents, committed in trees:
        first = len(paths)
        for node, parent in enumerate(parents):
            paths.append((*(before if parent < 0 else paths[first + parent]), first + node))
        before = paths[first + committed - 1] if committed else before
    return paths


def _by_model(model: PreTrainedModel, tokens: Tensor, paths: Sequence[tuple[int, ...]]) -> Tensor:
    """Log-probabilities [B, N, V] after each prompt and path, by the model's own forward."""
    width = PROMPTS[0] + max(map(len, paths))
    drafts = tokens[PROMPTS[0] :]
    rows = [torch.cat([tokens[:n], drafts[list(path)]]) for n in PROMPTS for path in paths]
    filled = [torch.cat([row, tokens[:1].expand(width - len(row))]) for row in rows]
    logits = own_logits(model, torch.stack(filled))
    last = torch.stack([logits[i, len(row) - 1] for i, row in enumerate(rows)])
    return last.float().log_softmax(-1).unflatten(0, (len(PROMPTS), len(paths)))


def _own_steps(model: PreTrainedModel, tokens: Tensor, paths: Sequence[tuple[int, ...]]) -> Tensor:
    """As :func:`_by_model`, but token by token as in generate: some mixers differ then."""
    own_logits(model, tokens[None, :1])  # for what it remembers of the model, not its logits
    longest = [path for path in paths if not any(_begins(path, other) for other in paths)]
    row_of = [next(i for i, x in enumerate(longest) if x[: len(p)] == p) for p in paths]
    width = max(map(len, paths))
    drafts = tokens[PROMPTS[0] :]
    forced = [drafts[[*path, *path[:1] * (width - len(path))]].tolist() for path in longest]
    places = [len(path) for path in paths]
    steps = []
    for count in PROMPTS:

        def next_token(row: int, before: Tensor, count: int = count) -> list[int]:
            return [forced[row][min(len(before) - count, width - 1)]]

        inputs = {"input_ids": tokens[:count].expand(len(longest), -1).to(model.device)}
        _, logits = _generate(model, inputs, width + 1, prefix_allowed_tokens_fn=next_token)
        steps.append(logits[row_of, places])
    return torch.stack(steps)


def _begins(path: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether ``other`` begins with ``path``."""
    return len(path) < len(other) and other[: len(path)] == path


def _generated(model: PreTrainedModel, prompt: VLMPrompt) -> tuple[Tensor, Tensor]:
    """The model's own next tokens [B, T] and log-probabilities [B, T, V]. The tokens may differ
    from the likeliest ones, because generation settings may forbid some.
    """
    return _generate(model, prompt.at_left()[0], OWN)


def _generate(
    model: PreTrainedModel, inputs: dict[str, Any], count: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """T = ``count`` tokens [B, T] of the model's own generate, and log-probabilities [B, T, V]."""
    plain = GenerationConfig(
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    generator: Any = model
    settings = generator.generation_config  # generate would add these to the plain ones
    generator.generation_config = GenerationConfig()
    try:
        with torch.inference_mode():
            generated = generator.generate(**inputs, generation_config=plain, **options)
    finally:
        generator.generation_config = settings
    logits = torch.stack(generated.logits, dim=1)
    return generated.sequences[:, -count:], logits.float().log_softmax(-1)


@torch.inference_mode()
def _ours(target: Target, prompt: VLMPrompt, drafts: Tensor, trees: Trees) -> Tensor:
    """Our log-probabilities [B, 1 + N, V] after ``prompt`` and, by one pass for each of the
    ``trees``, after ``drafts`` [B, N].
    """
    scores = [target.prefill(prompt, max(len(parents) for parents, _ in trees)).probs]
    remaining = drafts
    for parents, committed in trees:
        shape = TreeShape.from_parents(parents, drafts.device)
        scores.append(target.score(DraftTree(remaining[:, : shape.size], shape)).probs)
        if committed:
            path = torch.arange(committed, device=drafts.device).expand(len(drafts), -1)
            counts = torch.full_like(remaining[:, 0], committed)
            target.commit(VerifyResult(path, counts, remaining[:, shape.size]))
        remaining = remaining[:, shape.size :]
    return torch.cat(scores, dim=1).log()
