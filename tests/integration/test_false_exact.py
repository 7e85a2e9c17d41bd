"""Ways to a certificate that says `exact` and is not, and what comes of each."""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
import transformers

import specmm
from specmm.core.stats import merged_certificate, rule_certificate
from specmm.core.tree import DraftTree, TreeShape
from specmm.extending.outside import DraftRequest
from specmm.hf.prompts.options import Options
from specmm.image_ar.continuous.orders import MARSettings
from specmm.image_ar.scales.sampling import Sampling
from specmm.shape.trees import draw_siblings, make_tree
from specmm.verify import Decisions, GreedyMatch, GreedyMultiDraft, Grouped, Recursive, Typical
from specmm.verify.rule import OURS

FAN = "branching(3)"


@pytest.fixture(scope="module")
def draw(tiny):
    pipe = specmm.ImagePipeline.from_pretrained(tiny)
    pipe.set_progress_bar_config(disable=True)

    def certificate(**options):
        generator = torch.Generator().manual_seed(0)
        given = {"temperature": 1.0, "cfg": 1.0} | options
        return pipe(classes=[0], generator=generator, output_type="latent", **given).certificate

    return certificate


# ---- drafters of others


@dataclass
class Own:
    """Draws siblings as asked for, or ``how``; ``changed`` makes another of each tree."""

    target: object
    request: DraftRequest
    how: str | None = None
    changed: object = staticmethod(lambda tree: tree)

    def __post_init__(self):
        self.shape = self.request.tree
        self.max_nodes, self.max_depth = self.shape.size, self.shape.depth

    def begin(self, feedback, clock):
        pass

    def propose(self, feedback, uniforms):
        q = feedback.output.probs[:, -1:]
        drafts = self.shape.size - 1
        how = self.how or self.request.siblings
        drawn, probs = draw_siblings(q, drafts, uniforms, how)
        tokens = torch.cat([feedback.token[:, None], drawn[:, 0]], 1)
        recorded = torch.cat([q, probs[:, 0]], 1) if self.request.sampled else None
        return self.changed(DraftTree(tokens, self.shape, recorded))


def even(tree):
    """Not what the drafts were drawn from."""
    same = 1 / tree.probs.shape[-1]
    return replace(tree, probs=torch.full_like(tree.probs, same))


def pruned(tree):
    """Without the last sibling where its token is odd."""
    if int(tree.tokens[0, -1]) % 2 == 0:
        return tree
    shape = TreeShape.from_parents(tree.shape.parents[0, :-1].tolist())
    return DraftTree(tree.tokens[:, :-1], shape, tree.probs[:, :-1])


def called_a_chain(tree):
    """Siblings whose shape says that there are none."""
    return replace(tree, shape=TreeShape(tree.shape.parents, 1, 1))


# ---- rules of others


@dataclass(frozen=True)
class Wrong(Recursive):
    """Keeps a little too much of the nodes that are ``wrong``, and of no others."""

    wrong: object = None
    name: str = "wrong"

    def decisions(self, tree, p, *, measure=False):
        found = super().decisions(tree, p)
        accept = torch.where(self.wrong(tree), (1.1 * found.accept).clamp(max=1), found.accept)
        return Decisions(accept, found.next_probs)


@dataclass(frozen=True)
class Mode(Recursive):
    """Takes the likeliest token where nothing was drafted."""

    def decisions(self, tree, p, *, measure=False):
        return (GreedyMatch if tree.shape.size == 1 else Recursive)().decisions(tree, p)


@dataclass(frozen=True)
class Nothing(Recursive):
    """Goes on with what is no number."""

    def decisions(self, tree, p, *, measure=False):
        found = super().decisions(tree, p)
        return Decisions(found.accept, found.next_probs * torch.nan if len(p) > 1 else p)


@dataclass(frozen=True)
class Independent(Recursive):
    """Of others, for independent siblings."""

    siblings: ClassVar[str] = "independent"
    name: str = "independent"


class Both(Recursive):
    relaxed = True


def patched(rule, **own):
    """``rule`` with attributes of its own, which its class does not let anyone set."""
    vars(rule).update(own)
    return rule


def lax(tree, p, *, measure=False):
    found = Recursive().decisions(tree, p)
    return replace(found, accept=torch.ones_like(found.accept))


third = Wrong(wrong=lambda tree: tree.shape.ranks >= 2)
deep = Wrong(wrong=lambda tree: tree.shape.depths >= 14)
chosen = Wrong(wrong=lambda tree: torch.tensor(tree.probs is None))
disguised = type("Recursive", (Wrong,), {"__module__": "specmm.verify.exact"})
NOT = "is not: on trees of this run its tokens are"
EXACT = "exact: every token kept or drawn by the"
PROVIDED = "; provided that drafter Own of tests drew from what it recorded"
SIBLINGS = "must draw siblings as request.siblings says, "

WAYS = {  # options of a call, and what the certificate or the refusal says
    # rules of ours, as objects and with what anyone may set
    "a rule's name is set": (
        dict(rule=Typical(name="recursive")),
        "bounded: the recursive rule is relaxed",
    ),
    "a rule by name, called exact": (dict(rule="typical(exact=True)"), "unknown option of rule"),
    "an attribute is set": (dict(rule=patched(Typical(), exact=True)), f"heuristic: .* {NOT}"),
    "decisions are set": (dict(rule=patched(Recursive(), decisions=lax)), f"heuristic: .* {NOT}"),
    "the rule of greedy decoding": (
        dict(rule=GreedyMatch()),
        "rule greedy match serves only greedy decoding",
    ),
    # siblings that are drawn otherwise than the rule needs
    "independent, distinct": (
        dict(rule=Independent(), drafter=partial(Own, how="distinct"), tree="branching(2)"),
        f"{SIBLINGS}'independent', which rule independent needs, got others by what it records",
    ),
    "independent, the likeliest": (
        dict(rule=Independent(), drafter=partial(Own, how="likeliest and one"), tree=FAN),
        "got one of probability 0",
    ),
    "independent, as asked": (
        dict(rule=Independent(), drafter=Own, tree="branching(2)"),
        f"exact: .* by the word of its author, tests, .*{PROVIDED}$",
    ),
    "greedy multi-draft, distinct": (
        dict(rule="greedy-multi-draft", drafter=partial(Own, how="distinct"), tree=FAN),
        f"{SIBLINGS}'likeliest and one'",
    ),
    "greedy multi-draft, as asked": (
        dict(rule=GreedyMultiDraft(), drafter=Own, tree=FAN),
        f"{EXACT} greedy multi-draft .*{PROVIDED}$",
    ),
    "recursive takes independent ones": (
        dict(rule="recursive", drafter=partial(Own, how="independent"), tree=FAN),
        f"{EXACT} recursive .*{PROVIDED}$",
    ),
    "a rule of others takes what it was enumerated with": (
        dict(rule=third, drafter=partial(Own, how="independent"), tree="branching(2)"),
        f"{SIBLINGS}'distinct'",
    ),
    # rules of others that go wrong somewhere
    "at the third sibling": (dict(rule=third, tree=FAN), f"heuristic: .* {NOT}"),
    "at a third sibling that is not there": (
        dict(rule=third, tree="branching(2)"),
        "exact: .* by the word of its author, tests, and in 8 cases of this run's trees that",
    ),
    "at a sibling that cannot be enumerated": (
        dict(rule=third, drafter=Own, tree="branching(8)"),
        "heuristic: .* it could not be enumerated .* too many siblings, 8",
    ),
    "at the 14th level": (
        dict(rule=deep, drafter="jacobi", tree="chain(14)"),
        f"heuristic: .* {NOT}",
    ),
    "at a level that is not there": (
        dict(rule=deep, drafter="jacobi", tree="chain(13)"),
        "exact: .* cases of parts of this run's trees that were enumerated",
    ),
    "where drafts are chosen": (
        dict(rule=chosen, drafter="eagle", tree="dynamic(6, 2, 3)"),
        f"heuristic: .* {NOT}",
    ),
    "where nothing is drafted": (dict(rule=Mode()), f"heuristic: .* {NOT}"),
    "nothing that is a number": (dict(rule=Nothing()), "heuristic: .* are nan in total"),
    "under a name of ours": (
        dict(rule=disguised(wrong=third.wrong), tree=FAN),
        f"heuristic: .* {NOT}",
    ),
    "exact and relaxed": (dict(rule=Both()), "must not be both exact and relaxed"),
    # drafters of others
    "another distribution is recorded": (
        dict(drafter=partial(Own, changed=even), tree=FAN),
        f"{EXACT} recursive .*{PROVIDED}$",
    ),
    "shapes follow drafts": (
        dict(drafter=partial(Own, changed=pruned), tree=FAN),
        f"{PROVIDED} and chose its shapes without looking at its drafts$",
    ),
    "siblings are called a chain": (
        dict(drafter=partial(Own, changed=called_a_chain), tree=FAN),
        "trees of the depth and width that their shapes say, 1 and 1, got 1 and 3",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_comes_of_it(draw, way):
    options, said = WAYS[way]
    if said.startswith(("exact", "bounded", "heuristic", ";")):
        found = draw(**options)
        assert re.search(said, f"{found.kind}: {found.reason}"), found
    else:
        with pytest.raises(ValueError, match=said):
            draw(**options)


def test_a_run_that_is_stopped_claims_what_it_measured(text_pipe):
    distinct = dict(drafter=partial(Own, how="distinct"), tree=FAN, rule="typical")
    run = text_pipe.begin("def add(", max_new_tokens=9, temperature=1.0, seed=0, **distinct)
    for _, progress in zip(range(2), run.steps, strict=False):
        said = run.certificate(progress)
        assert said.kind == "bounded" and float(progress.measured) == progress.counts.sum() - 1
        printed = float(str(said).split("at most ")[1].split()[0])
        assert said.as_dict()["tv"] == said.tv <= printed < said.tv + 1e-4


def test_what_auto_and_others_take_is_claimed_by_its_rule(draw):
    assert draw(method="auto").kind == "exact"
    assert draw(method="sjd").kind == "exact"
    assert draw(method="lantern++", temperature=0.0).kind == "bounded"
    assert draw(rule="typical", temperature=0.0).kind == "exact"  # greedy: nothing is relaxed


def test_a_tree_of_ones_own_has_the_width_that_it_has(draw):
    parents = (-1, 0, 0, 0)
    lies = TreeShape(torch.tensor([parents]), 1, 1)
    assert make_tree(lies).width == 3 and make_tree(lies).parents.tolist() == [[*parents]]
    assert draw(rule=third, tree=lies).kind == "heuristic"


def test_relaxed_rules_have_no_such_option():
    for rule in (Typical, Grouped):
        with pytest.raises(TypeError, match="unexpected keyword argument 'exact'"):
            rule(exact=True)


def test_an_object_of_ours_asks_for_the_siblings_of_its_name():
    for kind in OURS.values():
        others = ("independent", "likeliest and one")
        if kind.siblings in others and kind.rule is not Recursive:
            assert kind.rule.siblings == kind.siblings
        assert getattr(kind.rule, "siblings", kind.siblings) == kind.siblings


def test_batches_claim_together_what_each_of_them_does():
    plain = rule_certificate("a", True, None)
    word = replace(plain, reason="by the word of its author")
    assert merged_certificate([(plain, 1), (plain, 2)]) == plain
    merged = merged_certificate([(plain, 1), (word, 1), (plain, 1)])
    assert merged.kind == "exact" and merged.reason == f"{plain.reason}; {word.reason}"
    relaxed = rule_certificate("b", False, 0.1)
    merged = merged_certificate([(plain, 1), (relaxed, 1), (word, 2)])
    assert merged.kind == "bounded" and merged.reason == relaxed.reason


# ---- settings that are named


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(temperature=0.0, top_k=5, top_p=0.5), {"temperature": 0.0, "cfg": 1.0}),
        (dict(cfg=0.5, cfg_interval=3), {"temperature": 1.0, "cfg": 1.0}),
        (dict(cfg=1.0, cfg_interval=3), {"temperature": 1.0, "cfg": 1.0}),
        (
            dict(top_k=5, top_p=0.5),
            {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "top_p_ties": "kept", "cfg": 1.0},
        ),
    ],
)
def test_what_touches_no_token_is_not_named(draw, options, named):
    assert draw(**{"top_k": 0} | options).settings == named


def test_what_touches_no_scale_or_chain_is_not_named():
    smooth = Sampling(more_smooth=True, top_k=9)
    assert smooth.settings == {"top_k": 9, "cfg": 0.0, "more_smooth": True}
    for temperature in (0.3, 0.0, (1.0, 0.5)):
        with pytest.raises(ValueError, match="which does not change its soft codes"):
            Sampling(more_smooth=True, temperature=temperature)
    assert Sampling(temperature=0.0, top_k=9).settings == {"temperature": 0.0, "cfg": 0.0}
    some = Sampling(temperature=(0.0, 0.5), top_k=9).settings
    assert some == {"temperature": (0.0, 0.5), "top_k": 9, "cfg": 0.0}
    found = MARSettings(4, "8", temperature=0.5, solver="ddim").claimed
    assert found == {"num_iter": 4, "head_steps": "8", "solver": "ddim", "cfg": 1.0}
    assert Options(temperature=0.0, top_k=5, top_p=0.5).processor.settings == {"temperature": 0.0}


class Louder(transformers.LogitsProcessor):
    def __call__(self, ids, scores):
        return 2 * scores


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(do_sample=False, min_p=0.1, top_k=5), {"temperature": 0.0}),
        (dict(do_sample=True, min_p=0.1, top_k=5), {"temperature": 1.0, "top_k": 5, "min_p": 0.1}),
        (
            dict(do_sample=False, logits_processor=[Louder()], repetition_penalty=1.2),
            {"temperature": 0.0, "repetition_penalty": 1.2, "logits_processor": "Louder"},
        ),
        (
            dict(do_sample=False, prefix_allowed_tokens_fn=lambda row, ids: list(range(9))),
            {"temperature": 0.0, "logits_processor": "PrefixConstrainedLogitsProcessor"},
        ),
    ],
)
def test_what_generate_was_asked_for(text_pipe, options, named):
    run = specmm.custom_generate()
    inputs = text_pipe.tokenizer("def add(", return_tensors="pt")
    text_pipe.model.generate(**inputs, max_new_tokens=4, custom_generate=run, **options)
    assert dict(run.last.certificate.settings) == named
    if "logits_processor" not in named:
        min_p = dict(temperature=named["temperature"], min_p=0.1, top_k=5, seed=0)
        assert text_pipe("def add(", max_new_tokens=4, **min_p).certificate.settings == named
