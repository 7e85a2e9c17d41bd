"""Method ``draft``: any drafter, tree and rule, in every family and from the command line."""

import json

import pytest
import torch

import specmm
from specmm import methods
from specmm.image_ar.tokens.assemble import assemble
from specmm.image_ar.tokens.drafters.block import BlockDrafter
from specmm.image_ar.tokens.drafters.eagle import EagleDrafter
from specmm.methods import CONTINUOUS, IMAGE_TOKENS, SCALES, SJD, TEXT, VQA, Draft, LanternPP
from specmm.shape.trees import make_tree
from specmm.verify.rule import rule_kind
from tests.commands import as_json, run, succeed

PICTURES = [  # each drafter, three rules
    Draft("block", "branching(2, 1)", "specinfer"),
    SJD(rule="traversal", coupled=False),
    Draft("eagle", "dynamic(total=6, depth=2, top_k=3)", "point-mass"),
]


@pytest.fixture(scope="module")
def pictures():
    pipe = specmm.ImagePipeline.from_pretrained("pocket/llamagen", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def texts():
    return specmm.TextPipeline.from_pretrained("pocket/coder", torch_dtype=torch.float32)


PICTURE = dict(classes=[0], output_type="latent")


@pytest.fixture(scope="module")
def plain(pictures):
    return pictures(**PICTURE, method="ar", temperature=0.0).tokens


@pytest.mark.parametrize("method", PICTURES, ids=str)
def test_pictures(pictures, plain, method):
    """Greedily those of plain decoding; drawn, the certificate says exact and drafts are kept."""
    assert torch.equal(pictures(**PICTURE, method=method, temperature=0.0).tokens, plain)
    out = pictures(**PICTURE, method=method, generator=torch.Generator().manual_seed(0))
    assert out.certificate.kind == "exact" and out.stats.tau > 1.2


def test_a_relaxed_rule_says_what_it_costs(pictures):
    method = Draft("block", rule="typical(epsilon=0.2)")
    out = pictures(classes=[0], method=method, generator=torch.Generator().manual_seed(0))
    assert out.certificate.kind == "bounded" and 0 < out.certificate.tv < 1


@pytest.mark.slow
def test_the_release_of_lantern_is_a_rule_by_name(pictures):
    """The method's option and the rule give the same tokens; the default gives others."""
    rules = {"lantern++-release": "release", "lantern++": "corrected"}
    found = []
    for rule, residual in rules.items():
        given = Draft("block", (2, 2, 1), f"{rule}(k=60, lambda_=20.0)", rejected_weight=0.3)
        preset = LanternPP(tree=(2, 2, 1), residual=residual)
        for method in (given, preset):
            generator = torch.Generator().manual_seed(0)
            out = pictures(classes=[0], method=method, generator=generator, output_type="latent")
            assert f"the {rule} rule" in out.certificate.reason
            found.append(out.tokens)
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])


TEXT_DRAFTERS = ("block", "deer", "text-draft")
TEXT_RULES = ("specinfer", "greedy-multi-draft", "point-mass")


@pytest.mark.parametrize(("rule", "method"), zip(TEXT_RULES, TEXT_DRAFTERS, strict=True))
def test_texts(texts, method, rule):
    prompt, draft = "def add(a, b):\n", Draft(method, (2, 1), rule)
    plain = texts(prompt, max_new_tokens=16).texts
    assert texts(prompt, max_new_tokens=16, method=draft).texts == plain
    out = texts(prompt, max_new_tokens=16, method=draft, temperature=1.0, seed=0)
    assert out.certificate.kind == "exact" and out.method == "draft"


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Draft("blok"), "unknown drafter 'blok'; did you mean 'block'"),
        (Draft("block", "chain(99)"), "at most the drafter's"),
        (Draft("jacobi", (2, 1)), "jacobi needs a chain"),
        (Draft("block", (2, 1), "block"), "must be a chain"),
        (Draft("block", "dynamic(total=6)", "point-mass"), "fixed shape"),
        (SJD(rule="block"), "coupled drafts need a rule that tests a draft before those after it"),
        (SJD(rule="traversal"), "which may look ahead: use recursive, coupled=False"),
    ],
)
def test_what_does_not_go_together(pictures, method, said):
    with pytest.raises(ValueError, match=said):
        pictures(classes=[0], method=method)


def test_texts_that_do_not_go_together(texts):
    for method, said in (
        (
            Draft("diffuspec"),
            "takes any tree and rule 'diffuspec'; choose from: assistant, block, deer",
        ),
        (Draft("block"), "needs a tree of fixed shape"),
        (Draft("block", (2, 1), "lantern++"), "compares codes of pictures"),
    ):
        with pytest.raises(ValueError, match=said):
            texts("a", method=method)


def test_the_command_line_lists_and_takes_them(tmp_path):
    listed = as_json("methods")
    assert listed["rules"]["specinfer"].startswith("exact")
    assert listed["rules"]["typical"].startswith("relaxed")
    pictures = {"block", "eagle", "jacobi", "prompt-lookup"}
    assert pictures == set(listed["drafters of image tokens"])
    assert listed["methods"]["text"]["draft"][0] == "as its rule"
    assert listed["methods"]["image tokens"]["lantern++"][0] == "bounded"
    assert "draft" not in listed["drafters of answers and texts"] and "``" not in json.dumps(listed)
    said = [about for family in listed["methods"].values() for _, about in family.values()]
    assert all(about.endswith((".", ".)")) for about in said)  # whole sentences
    for tree in listed["trees"]:
        assert tree.startswith("sequoia") or make_tree(tree)
    assert "delayed(trunk=2" in run("methods").stdout
    command = ["generate", "pocket/llamagen", "--class", "heart", "--method", "draft"]
    options = ["-o", "tree=delayed(1, 2, 2)", "-o", "rule=specinfer"]
    result = succeed(*command, *options, "--out", str(tmp_path), "--json")
    assert "exact" in json.dumps(json.loads(result.stdout)["certificate"])


@pytest.mark.parametrize(
    "registry",
    [IMAGE_TOKENS, SCALES, CONTINUOUS, VQA, TEXT],
    ids=["tokens", "scales", "continuous", "answers", "text"],
)
def test_what_methods_claim_is_what_their_rules_claim(registry):
    for name in registry:
        choice = getattr(registry.get(name)(), "choice", None)
        if choice is not None and name != "draft":
            claimed = "exact" if rule_kind(choice.rule).rule.exact else "bounded"
            assert registry.get(name).claims == claimed, name


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (methods.LanternPP(lambda_=float("nan")), "lambda_ must be finite and at least 1, got nan"),
        (methods.LanternPP(lambda_=float("inf")), "lambda_ must be finite and at least 1, got inf"),
        (methods.Lantern(delta=float("nan")), r"delta must be in \[0, 1\], got nan"),
        (methods.GSD(gap=float("nan")), "span must be at least 0 and gap in .* got 7 and nan"),
        (methods.Draft(rule="lantern(k=many)"), "k must be a whole number, got 'many'"),
        (methods.Draft(rule="typical(epsilon=some)"), "epsilon must be a number, got 'some'"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_options_of_rules_that_are_no_numbers(pictures, method, said):
    with pytest.raises(ValueError, match=said):
        pictures(classes=[1], method=method, output_type="latent")


def test_a_given_drafter_takes_the_place_of_the_models(copy, tiny):
    """Also of one that no longer fits, which is not read; and it is what "any" stands for."""
    block = copy / "drafters/block/config.json"
    facts = json.loads(block.read_text()) | {"target_fingerprint": "0" * 12}
    block.write_text(json.dumps(facts))
    drafted = {}
    for name, (model, drafter) in {
        "block": (copy, tiny / "drafters/block"),
        "eagle": (tiny, tiny / "drafters/eagle"),
        "none": (tiny, None),
    }.items():
        pipe = specmm.ImagePipeline.from_pretrained(model, drafter=drafter)
        assert sorted(pipe.parts.drafters) == ["block", "eagle"]
        drafted[name] = type(assemble(methods.Lantern(k=3), pipe.target(), pipe.parts)[1])
    assert drafted == {"block": BlockDrafter, "eagle": EagleDrafter, "none": EagleDrafter}
