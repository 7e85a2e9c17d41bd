"""Methods by name, their options, and their spelling on the command line."""

import functools
import inspect
import json
import re
from pathlib import Path

import pytest
import torch

from specmm import methods
from specmm.extending.registry import Registry
from specmm.image_ar.tokens.assemble import DRAFTERS as OF_PICTURES
from specmm.methods import label
from specmm.methods.base import DRAFTERS
from specmm.methods.making import parse_method, parse_methods
from specmm.verify.rule import make_rule


def test_names_lead_to_methods():
    assert methods.resolve("lantern++", k=5) == methods.LanternPP(k=5)
    assert methods.resolve(methods.LanternPP(k=5), lambda_=3.0) == methods.LanternPP(
        lambda_=3.0, k=5
    )
    for name in methods.IMAGE_TOKENS:
        assert methods.resolve(name).name == name


@pytest.mark.parametrize("family", methods.Methods.families)
def test_auto_may_relax_where_tokens_are_pictures_alone(family):
    registry = methods.Methods.families[family]
    if "auto" not in registry:
        return
    given = methods.Auto("bounded")
    if registry in (methods.IMAGE_TOKENS, methods.TRANSFORMERS_IMAGES):
        assert methods.by_hand(registry, given) == given
        return
    for method in ("auto", methods.Auto()):
        with pytest.raises(ValueError, match=f"must be exact for {family}, got bounded: .* alone"):
            methods.by_hand(registry, given)
        with pytest.raises(ValueError, match=f"must be exact for {family}, got bounded: .* alone"):
            methods.make(registry, method, certificate="bounded")


@pytest.mark.parametrize(
    ("registry", "name", "tree", "rule"),
    [
        (methods.VQA, "msd", "chain(3)", "typical"),
        (methods.VQA, "msd", None, "typical"),
        (methods.TEXT, "eagle3", "chain(3)", None),
        (methods.TEXT, "mtp", None, "block"),
        (methods.VQA, "assistant", "chain(2)", "block"),
        (methods.TEXT, "block", "chain(3)", "specinfer"),
    ],
)
def test_a_tree_and_a_rule_chosen_by_hand_are_read(registry, name, tree, rule):
    found = methods.by_hand(registry, name, tree=tree, rule=rule)
    assert getattr(found, "sampled", True)
    assert found.tree == (tree or methods.make(registry, name).tree)
    assert rule is None or found.rule == rule


def test_options_from_text_have_their_types():
    assert SPELT(["lambda=3", "k=7"]) == methods.LanternPP(lambda_=3.0, k=7)
    assert SPELT(["lambda-=3"]) == methods.LanternPP(lambda_=3.0)
    trees = {"3,2,1": (3, 2, 1), "(3, 2)": (3, 2), "4": (4,), "mc_sim_7b_63": "mc_sim_7b_63"}
    for text, tree in trees.items():
        given = ["rule=traversal", f"tree={text}"]
        assert parse_method(methods.IMAGE_TOKENS, "speculative", given).tree == tree
    for text, tree in {"8": 8, "2,1,1": (2, 1, 1)}.items():
        assert parse_method(methods.TEXT, "block", [f"tree={text}"]).tree == tree


def test_a_methods_options_may_stand_beside_its_name():
    registry = methods.IMAGE_TOKENS
    assert parse_method(registry, " sjd( window=4 )") == methods.SJD(4)
    given = parse_method(registry, "lantern++(k=7, tree=(2,1))", ["lambda=3"])
    assert given == methods.LanternPP(lambda_=3.0, k=7, tree=(2, 1))
    assert methods.resolve("lantern++(k=7, tree=(2,1))", lambda_=3.0) == given
    for wrong in ("", "ar,sjd", "sjd(window=4), ar"):
        with pytest.raises(ValueError, match="method must be one, got"):
            parse_method(registry, wrong)
    with pytest.raises(ValueError, match="must read NAME or NAME"):
        parse_method(registry, "sjd(window=4")


def test_lists_of_methods():
    found = parse_methods(
        methods.IMAGE_TOKENS, "ar, lantern++(lambda_=4, tree=(2,1)),sjd(window=4)"
    )
    assert found == [methods.AR(), methods.LanternPP(lambda_=4.0, tree=(2, 1)), methods.SJD(4)]
    wanted = ["ar", "lantern++(lambda_=4.0, tree=(2, 1))", "sjd(window=4)"]
    assert [label(m) for m in found] == wanted
    for wrong in ("", "lantern++(k=1", "ar,lanturn"):
        with pytest.raises(ValueError):
            parse_methods(methods.IMAGE_TOKENS, wrong)


def test_methods_declare_what_jobs_and_the_app_ask():
    def having(registry: Registry, name: str) -> set[str]:
        return {kind for kind in registry if getattr(registry.get(kind)(), name)}

    assert having(methods.GENERATE, "timed") == {"auto"}
    assert having(methods.SCALES, "timed") == {"auto", "code"} and not methods.CoDe(n=2).timed
    assert set(methods.VQA) - having(methods.VQA, "streams") == {"verdict"}
    assert not having(methods.SCALES, "one_generator") and methods.CoDe(release=True).one_generator
    pictures = {"ar", "sjd", "gsd", "speculative", "lantern++", "draft"}
    assert having(methods.IMAGE_TOKENS, "can_refill") == pictures


def test_drafters_are_asked_whether_their_rows_can_be_refilled():
    """Those of answers and texts say what their methods declare; all there are can be asked."""
    presets = {
        name
        for name in methods.GENERATE
        if "rule" in inspect.signature(methods.GENERATE.get(name)).parameters
    } - {"draft"}
    assert set(DRAFTERS) == presets | set(OF_PICTURES)
    able = {name for name in DRAFTERS if methods.Draft(name).can_refill}
    declared = {name for name in presets if methods.make(methods.GENERATE, name).can_refill}
    assert able == declared | {"jacobi", "prompt-lookup"}
    assert {"eagle3", "mtp", "block"} <= able


def test_the_residual_of_lantern():
    for kind in (methods.Lantern, methods.LanternPP):
        assert kind().residual == "corrected" and "release" not in kind().choice.rule
        assert kind(residual="release").choice.rule.startswith(f"{kind.name}-release(")
        with pytest.raises(ValueError, match="residual must be one of corrected, release"):
            kind(residual="offical")  # type: ignore[arg-type]


def test_a_rules_name_says_its_residual():
    table = torch.zeros(4, 4, dtype=torch.int64)
    assert make_rule("lantern++(k=1, residual=release)", table=table).name == "lantern++-release"
    with pytest.raises(ValueError, match="unknown option of rule lantern-release 'residual'"):
        make_rule("lantern-release(k=1, residual=corrected)", table=table)


SPELT = functools.partial(parse_method, methods.IMAGE_TOKENS, "lantern++")
LANTERN_PP, MAKE = r"unknown option of lantern\+\+", methods.make
WRONG = [
    (lambda: methods.resolve("lantern+"), r"did you mean 'lantern\+\+'"),
    (lambda: methods.resolve("qqqq"), "choose from: ar, auto, draft, eagle"),
    (lambda: methods.resolve("lantern++", lambd=2), f"{LANTERN_PP} 'lambd'.*mean 'lambda_'"),
    (lambda: methods.resolve("ar", k=2), "unknown option of ar"),
    (lambda: methods.resolve("sjd", rejected_weight=0.2), "option of sjd 'rejected_weight'"),
    (lambda: methods.resolve("sjd", window=None), "window must be a whole number, got None"),
    (lambda: methods.SJD(window="8"), "window must be a whole number, got '8'"),
    (lambda: methods.SJD("8"), "window must be a whole number, got '8'"),
    (lambda: methods.LanternPP(lambda_=[2]), "lambda_ must be a number, got a list"),
    (lambda: methods.CoDe(1.5), "n must be a whole number, got 1.5"),
    (lambda: methods.CSpD(variant="paper"), "variant must be one of exact, release, got 'paper'"),
    (lambda: MAKE(methods.VQA, "msd", rule="typical"), "of msd must .* 'typical' alone; .*sampled"),
    (lambda: MAKE(methods.TEXT, "eagle3", tree=(2, 1)), "of eagle3 must come with a drawn tree"),
    (lambda: MAKE(methods.TEXT, "mtp", sampled=False, rule="block"), "give sampled=True, too"),
    (lambda: MAKE(methods.TEXT, "deer", rule="typical"), r"give a tree, as chain\(4\), too"),
    (lambda: MAKE(methods.TEXT, "block", rule="typical", tree=8), "of block must come with"),
    (lambda: SPELT(["k=many"]), "k must be a whole number, got 'many'"),
    (lambda: SPELT(["lambda_=x"]), "lambda_ must be a number"),
    (lambda: SPELT(["residual=relase"]), "did you mean 'release'"),
    (lambda: SPELT(["k"]), "must read KEY=VALUE"),
    (lambda: SPELT(["lamda_=2"]), "did you mean 'lambda_'"),
    (lambda: SPELT(["tree=1.5,2"]), "whole numbers such as"),
]


@pytest.mark.parametrize(("made", "said"), WRONG, ids=[said for _, said in WRONG])
def test_names_and_options_that_are_wrong(made, said):
    with pytest.raises(ValueError, match=said):
        made()


def test_an_option_that_a_method_has_not_is_named():
    said = "unknown option of LanternPP 'lamda'; did you mean 'lambda_'"
    with pytest.raises(TypeError, match=said):
        methods.LanternPP(lamda=2.0)
    assert list(inspect.signature(methods.LanternPP).parameters)[:2] == ["lambda_", "k"]


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED = {  # the file that has a method's best row
    methods.DiffuSpec: "gpu/pocket-coder",
    methods.SpecDiff: "gpu/pocket-coder",
    methods.Eagle: "speed",
    methods.CSpD: "mar",
}


@pytest.mark.parametrize("kind", MEASURED)
def test_what_a_method_says_it_gained_here_is_what_was_measured(kind):
    rows = json.loads((RESULTS / f"{MEASURED[kind]}.json").read_text())["rows"]
    best: dict[str, float] = {}
    for row in rows:
        if "sure=" in row["method"]:
            continue  # an option of self that was removed
        name = row["method"] if row["method"] == "exact" else re.split("[(,]", row["method"])[0]
        if row["method"] == name or name != "exact":  # exact CSpD, with its own settings
            best[name] = max(best.get(name, 0.0), row["speedup"])
    told = re.findall(r"(\w+ )?([\d.]+)x", kind.here)
    assert told and all(f"{best[name.strip() or kind.name]:.2f}" == x for name, x in told)
    every = {m for family in methods.Methods.families.values() for m in map(family.get, family)}
    assert {m for m in every if m.here} == set(MEASURED)
