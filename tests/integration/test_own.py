"""Drafters, rules and trees of one's own: registered, in packages, as objects; and what is claimed
of them.
"""

import json
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

import specmm
from specmm import methods
from specmm.core.decode import decode
from specmm.core.drafter import Feedback
from specmm.core.randomness import Uniforms
from specmm.core.stats import Stats
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.extending import extension
from specmm.extending.outside import DraftRequest, OutsideDrafter
from specmm.extending.registry import REGISTERED
from specmm.hf.prompts.options import Options
from specmm.kernels.acceptance import fused_options
from specmm.shape.trees import branching, make_tree
from specmm.verify import Recursive
from specmm.verify.claims import GivenTrees, claim
from specmm.verify.exact import strict_step, top_down
from tests.commands import as_json, run
from tests.sampling import p_of

FILES = Path(__file__).parents[2] / "demos" / "own"
PROMPT = "def add(a, b):\n"


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    for kind in REGISTERED:
        monkeypatch.setitem(REGISTERED, kind, {})


@pytest.fixture
def own():
    """The examples of demos/own, registered."""
    for name in ("drafter", "rule", "tree"):
        extension.load(str(FILES / f"{name}.py"))
    return {kind: dict(things) for kind, things in REGISTERED.items()}


@pytest.fixture(scope="module")
def coder():
    return specmm.TextPipeline.from_pretrained("pocket/coder", torch_dtype=torch.float32)


def draw(pipe, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return pipe(classes=[0], generator=generator, output_type="latent", **options)


@pytest.mark.slow
def test_names_registered_outside_draw_on_a_pocket_model_with_a_certificate(own):
    pipe = specmm.ImagePipeline.from_pretrained("pocket/llamagen", torch_dtype=torch.float32)
    out = draw(pipe, drafter="echo", tree="comb(2, 2)", rule="plain-ratio")
    assert out.certificate.kind == "exact" and out.stats.tau > 1
    assert (
        "by the word of its author, rule, and in 8 cases of this run's trees"
        in out.certificate.reason
    )
    assert "provided that drafter echo of drafter drew" in out.certificate.reason
    out = draw(pipe, tree="chain(4)", rule="generous(factor=3)")
    assert out.certificate.kind == "bounded" and out.certificate.tv > 0
    assert "the generous rule is relaxed" in out.certificate.reason
    assert "by rule, not specmm" in out.certificate.reason


def test_objects_are_as_good_as_names(own, make_tiny):
    pipe = make_tiny()
    named = draw(pipe, drafter="echo", tree="comb(2, 2)", rule="generous(factor=2)")
    echo = own["drafter"]["echo"]
    shape = own["tree"]["comb"](2, 2)
    rule = own["rule"]["generous"](2)
    given = draw(pipe, drafter=echo, tree=shape, rule=rule)
    method = methods.Draft(partial(echo), (-1, 0, 0, 1, 2), rule)
    for other in (given, draw(pipe, method=method)):
        assert torch.equal(named.tokens, other.tokens)
        assert other.stats.kept == named.stats.kept and other.certificate.tv == named.certificate.tv
    assert method.can_refill is hasattr(echo, "start_row")


@dataclass(frozen=True)
class Mine(methods.Composed):
    """A method of one's own."""

    name = "mine"
    rule: str = "recursive"

    @property
    def choice(self):
        return methods.Choice("echo", "chain(2)", self.rule)


def test_greedy_decoding_is_plain_decoding(own, coder, make_tiny):
    plain = coder(PROMPT, max_new_tokens=24).tokens[0]
    for options in (
        dict(drafter="echo", tree="comb(3, 2)", rule="plain-ratio"),
        dict(drafter=own["drafter"]["echo"], rule="generous"),  # greedy decoding is not relaxed
        dict(method=Mine()),
    ):
        out = coder(PROMPT, max_new_tokens=24, **options)
        assert torch.equal(out.tokens[0], plain)
        assert out.certificate.kind == "exact" and "drafter echo" not in out.certificate.reason
    pipe = make_tiny()
    tokens = draw(pipe, temperature=0.0, method="ar").tokens
    assert torch.equal(draw(pipe, temperature=0.0, drafter="echo", tree=(2, 1)).tokens, tokens)
    assert torch.equal(draw(pipe, temperature=0.0, method=Mine()).tokens, tokens)


def test_pipelines_take_a_drafter_when_they_are_made(own, coder, tiny):
    from specmm import ImagePipeline, TextPipeline

    pipe = TextPipeline(coder.model, coder.tokenizer, drafter="echo")
    assert pipe.method == methods.Draft("echo")
    batch = [PROMPT, "import os\n", "class A:\n"]  # two rows for three texts: one begins anew
    out = pipe(batch, max_new_tokens=12, temperature=1.0, seed=0, batch_size=2)
    assert out.certificate.kind == "exact" and [len(row) for row in out.tokens] == [12] * 3
    pictures = ImagePipeline.from_pretrained(tiny, drafter=own["drafter"]["echo"])
    assert draw(pictures).method == "draft"
    block = ImagePipeline.from_pretrained(tiny, drafter=tiny / "drafters" / "block")
    assert block.parts.serves(methods.Speculative())
    with pytest.raises(ValueError, match="a block drafter or an EAGLE head, got"):
        ImagePipeline.from_pretrained(tiny, drafter=tiny)


def test_answers_and_generate_take_them(own):
    pipe = specmm.VQAPipeline.from_pretrained("pocket/llava", torch_dtype=torch.float32)
    plain = pipe(None, "Say hello.", max_new_tokens=8)
    drafted = pipe(None, "Say hello.", max_new_tokens=8, drafter="echo", tree="comb(2, 1)")
    assert torch.equal(plain.tokens[0], drafted.tokens[0])
    inputs = pipe.tokenizer("what is", return_tensors="pt")
    options = dict(max_new_tokens=8, do_sample=False)
    plain = pipe.model.generate(**inputs, **options)
    for given in (dict(method=methods.Draft(own["drafter"]["echo"])), dict(drafter="echo")):
        run = specmm.custom_generate(**given)
        assert torch.equal(pipe.model.generate(**inputs, custom_generate=run, **options), plain)


# ---- what is claimed

TREES = GivenTrees([((-1, 0, 0, 1, 1), True)])


@dataclass(frozen=True)
class Broken:
    """Says that it is exact and draws from p once a draft is rejected."""

    name: str = "broken"
    exact: bool = True

    def decisions(self, tree, p, *, measure=False):
        return top_down(tree, p, lambda target, trial: (strict_step(target, trial)[0], target))


@dataclass(frozen=True)
class ChainsOnly(Broken):
    """Exact, for chains."""

    def decisions(self, tree, p, *, measure=False):
        if tree.shape.width > 1:
            raise ValueError("chains only")
        return top_down(tree, p, strict_step)


@dataclass(frozen=True)
class Unmeasured(Broken):
    """Relaxed, and measures nothing."""

    exact: bool = False


@dataclass(frozen=True)
class Failing(Broken):
    """Cannot be run."""

    def decisions(self, tree, p, *, measure=False):
        raise RuntimeError("no kernel for float64")


def test_a_rules_claim_is_enumerated_before_it_is_printed(own, make_tiny):
    assert claim(own["rule"]["plain-ratio"](), None, TREES).kind == "exact"
    pipe = make_tiny()
    said = draw(pipe, rule=Broken()).certificate
    assert said.kind == "heuristic" and "calls itself exact" in said.reason
    assert "and is not: on trees of this run" in said.reason and "drafter" not in said.reason
    assert draw(pipe, tree="chain(2)", rule=ChainsOnly()).certificate.kind == "exact"
    assert draw(pipe, rule=Unmeasured()).certificate.kind == "heuristic"
    said = claim(Failing(), None, TREES)
    assert said.kind == "heuristic" and "RuntimeError: no kernel for float64" in said.reason
    assert "its author" not in claim(Recursive(), None, TREES).reason


class Slack(Recursive):
    """Equal to others of its class, whatever it does."""

    lax = False

    def decisions(self, tree, p, *, measure=False):
        found = super().decisions(tree, p, measure=measure)
        return replace(found, accept=torch.ones_like(found.accept)) if self.lax else found


def lax_rule():
    lax = Slack()
    lax.__dict__["lax"] = True
    assert lax == Slack()
    return lax


def test_the_rule_at_hand_runs(make_tiny):
    """Not one that is equal to it."""
    pipe = make_tiny()
    strict, lax = (draw(pipe, rule=rule, tree="chain(4)") for rule in (Slack(), lax_rule()))
    assert strict.certificate.kind == "exact" and lax.certificate.kind == "heuristic"
    assert strict.stats.tau < lax.stats.tau


def test_compiled_texts_take_the_rule_at_hand():
    """Equal ones before it have left their programs."""
    pipe = specmm.TextPipeline.from_pretrained("pocket/coder", torch_dtype=torch.float32)
    rules = [Slack(), lax_rule()]
    chains = [methods.by_hand(methods.TEXT, "block", None, "chain(3)", rule) for rule in rules]
    assert chains[0] == chains[1]
    for _ in range(2):
        options = Options(temperature=1.0, compiled=True)
        made = [pipe.rounds_of(x, pipe.target(x, options), options) for x in chains]
        assert all(one.parts.rule is rule for one, rule in zip(made, rules, strict=True))
    assert len(pipe.kept.found) == 2


def test_a_claim_is_of_the_rule_at_hand():
    """Not of one that is equal to it, nor of one that it holds."""
    assert claim(Slack(), None, TREES).kind == "exact"
    assert claim(lax_rule(), None, TREES).kind == "heuristic"
    holder = Broken()
    holder.__dict__["func"] = Recursive()
    assert claim(holder, None, TREES).kind == "heuristic"


def test_no_kernel_of_ours_stands_for_a_rule_of_others():
    """One that inherits from ours may decide otherwise."""
    tree = DraftTree(torch.zeros(1, 2, dtype=torch.int64), TreeShape.chain(1))
    assert fused_options(Recursive(), tree) is not None
    assert fused_options(type("Mine", (Recursive,), {})(), tree) is None


class Liar:
    """Records another distribution than the one that its drafts are drawn from."""

    def __init__(self, echo):
        self.echo = echo

    def __getattr__(self, name):
        return getattr(self.echo, name)

    def propose(self, feedback, uniforms):
        tree = self.echo.propose(feedback, uniforms)
        even = torch.full_like(tree.probs, 1 / tree.probs.shape[-1])
        return DraftTree(tree.tokens, tree.shape, even)


ROWS = 4000


def test_samples_follow_the_target_and_a_wrong_record_shows(own):
    """Chi-square of the first three tokens, of which a round decides."""
    from demos.own.drafter import Echo
    from demos.own.target import Markov, drawn, table

    plain, drafted = drawn()
    assert isinstance(drafted, Stats) and plain.tau == 1.0 and drafted.tau > 1.5
    size = 3
    rows = table(size, seed=5)
    target = Markov(rows)
    first = rows[0][:, None, None] * rows[:, :, None] * rows[None]

    def p_value(drafter):
        prompt = torch.zeros(ROWS, 1, dtype=torch.int64)
        uniforms = Uniforms.from_seeds(range(ROWS))
        *_, end = decode(target, drafter, Recursive(), prompt, 3, uniforms)
        return p_of(first.flatten(), end.tokens[:, :3])

    echo = Echo(target, DraftRequest(branching([2, 1]), True, "distinct"))
    assert p_value(OutsideDrafter(echo, "echo", "tests")) > 0.01
    assert p_value(OutsideDrafter(Liar(echo), "liar", "tests")) < 1e-6


def test_the_example_records_siblings_given_the_earlier(own):
    probs = torch.tensor([0.5, 0.3, 0.2]).expand(50, 1, 3)
    feedback = Feedback(TargetOutput(probs, probs), torch.zeros(50, dtype=torch.int64))
    request = DraftRequest(branching([2]), True, "distinct")
    tree = own["drafter"]["echo"](None, request).propose(feedback, Uniforms.from_seeds(range(50)))
    first = tree.tokens[:, 1:2]
    assert torch.equal(tree.probs[:, 1], probs[:, 0])
    assert tree.probs[:, 2].gather(1, first).count_nonzero() == 0
    rest = probs[:, 0].scatter(1, first, 0.0)
    torch.testing.assert_close(tree.probs[:, 2], rest / rest.sum(1, keepdim=True))


# ---- packages


def test_an_installed_package_brings_its_own_by_entry_points(tmp_path, monkeypatch, make_tiny):
    package = tmp_path / "twigs"
    package.mkdir()
    for name in ("drafter", "rule", "tree"):
        text = (FILES / f"{name}.py").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("@specmm.register")]
        (package / f"{name}.py").write_text("\n".join(lines))
    (package / "__init__.py").touch()
    facts = tmp_path / "twigs-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: twigs\nVersion: 1.0\n")
    points = {
        "drafters": "murmur = twigs.drafter:Echo\nlost = twigs.drafter:Nothing",
        "rules": "ratio = twigs.rule:PlainRatio",
        "trees": "twig = twigs.tree:comb\nchain = twigs.tree:comb",  # ours is not replaced
    }
    text = "".join(f"[specmm.{group}]\n{lines}\n" for group, lines in points.items())
    (facts / "entry_points.txt").write_text(text)
    pipe = make_tiny()
    with pytest.raises(ValueError, match="unknown drafter 'murmur'"):
        draw(pipe, drafter="murmur")
    monkeypatch.syspath_prepend(str(tmp_path))
    out = draw(pipe, drafter="murmur", tree="twig(2, 2)", rule="ratio")
    assert out.certificate.kind == "exact" and "its author, twigs" in out.certificate.reason
    assert make_tree("chain(3)").parents.tolist() == [[-1, 0, 1, 2]]
    with pytest.raises(ValueError, match="drafter 'lost' of twigs must be importable as twigs"):
        draw(pipe, drafter="lost")
    shutil.move(facts, tmp_path / "twigs-1.1.dist-info")  # as a package that is installed again
    text = text.replace("\nlost = twigs.drafter:Nothing", "")
    (tmp_path / "twigs-1.1.dist-info" / "entry_points.txt").write_text(text)
    listed = as_json("methods")
    assert "murmur" in listed["drafters of image tokens"]
    assert "lost" not in listed["drafters of image tokens"]
    assert "murmur" in listed["drafters of answers and texts"]
    assert listed["rules"]["ratio"].startswith("exact by the word of twigs: Speculative sampling")
    assert "twig(teeth, length)" in listed["trees"]


# ---- mistakes


@pytest.mark.parametrize(
    ("kind", "name", "thing", "said"),
    [
        ("drafters", "x", Liar, "unknown kind of thing to register 'drafters'; did you mean 'dr"),
        ("drafter", "block", Liar, "drafter 'block' is specmm's own; choose another name"),
        ("rule", "a(b)", Broken, "name must be of letters"),
        ("drafter", "x", 3, r"a class or a function of \(target, request\), .* got x, a int"),
        ("drafter", "x", torch.nn.Linear(1, 1), "or have begin, propose"),
        ("rule", "x", Liar, r"rule must have decisions\(tree, p, \*, measure=False\) and exact"),
        ("tree", "x", lambda width: None, "must be made by a function of numbers and device"),
        ("tree", "sequoia", Liar, "is specmm's own"),
    ],
)
def test_what_cannot_be_registered(kind, name, thing, said):
    with pytest.raises(ValueError, match=said):
        specmm.register(kind, name, thing)


def test_a_rule_must_be_hashable_and_say_how_siblings_are_drawn():
    @dataclass
    class Loose:
        name: str = "loose"
        exact: bool = True

        def decisions(self, tree, p, *, measure=False):
            return top_down(tree, p, strict_step)

    with pytest.raises(ValueError, match="hashable, because calls share it, got a Loose"):
        specmm.register("rule", "loose", Loose)
    odd = type("Odd", (Broken,), {"siblings": "distinkt"})
    with pytest.raises(ValueError, match="rule odd 'distinkt'; did you mean 'distinct'"):
        specmm.register("rule", "odd", odd)


def proposing(echo, **changes):
    """A drafter that changes what ``echo`` proposes: tokens, shape, probs."""

    class Changed(echo):
        def propose(self, feedback, uniforms):
            tree = super().propose(feedback, uniforms)
            parts = dict(tokens=tree.tokens, shape=tree.shape, probs=tree.probs)
            parts |= {name: change(tree) for name, change in changes.items()}
            return DraftTree(**parts)

    return Changed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(tokens=lambda t: t.tokens + 1), "must put feedback.token at node 0"),
        (
            dict(probs=lambda t: 1.5 * t.probs - 0.5 / 64),
            "must record probabilities from 0 to 1, got -0",
        ),
        (dict(probs=lambda t: 2 * t.probs), "whose sums are 1, got 2 to 2"),
        (dict(probs=lambda t: t.probs[..., :-1]), "distributions over 64 tokens, got 63"),
        (
            dict(tokens=lambda t: torch.cat([t.tokens[:, :1], t.tokens[:, 1:] * 0 + 64], 1)),
            r"must draft tokens in \[0, 64\)",
        ),
        (
            dict(probs=lambda t: torch.zeros_like(t.probs).scatter(-1, _next(t), 1.0)),
            "got one of probability 0",
        ),
    ],
)
def test_trees_that_break_the_contract(own, make_tiny, changes, said):
    drafter = proposing(own["drafter"]["echo"], **changes)
    with pytest.raises(ValueError, match=f"drafter Changed of .* {said}"):
        draw(make_tiny(), drafter=drafter)


def _next(tree):
    return ((tree.tokens + 1) % tree.probs.shape[-1])[..., None]


def test_options_and_trees_that_others_do_not_take(own, make_tiny):
    pipe = make_tiny()
    for options, said in (
        (dict(drafter="echo(order=2)"), r"drafter echo takes \(\), got echo\(order=2\)"),
        (dict(drafter="ecko"), "unknown drafter 'ecko'; did you mean 'echo'"),
        (dict(rule="generous(fctor=2)"), "option of rule generous 'fctor'; did you mean 'factor'"),
        (dict(tree="comb(1, 2, 3)"), r"a tree must read as comb\(teeth, length\)"),
        (dict(tree="comb(0)"), "teeth and length must be at least 1"),
        (dict(method="sjd", drafter="echo"), "unknown option of sjd 'drafter'"),
        (dict(drafter=TreeShape), "a class or a function of"),
    ):
        with pytest.raises(ValueError, match=said):
            draw(pipe, **options)
    var = methods.CONTINUOUS
    with pytest.raises(ValueError, match="tree must be None for models without a choice of draft"):
        methods.by_hand(var, "ar", tree="comb(1)")


def test_files_are_loaded_by_the_command_line(tmp_path):
    listed = run("--load", FILES / "tree.py", "methods")
    assert "comb(teeth, length)" in listed.stdout
    broken = tmp_path / "broken.py"
    broken.write_text("def (")
    for place in (broken, tmp_path / "none.py", "no_such_module_here"):
        with pytest.raises(ValueError, match="must be a Python file or a module, got"):
            extension.load(str(place))
    failing, named = tmp_path / "failing.py", tmp_path / "json.py"
    failing.write_text("nobody")
    named.write_text("")
    with pytest.raises(ValueError, match=r"got .*failing.py: name 'nobody' is not defined"):
        extension.load(str(failing))
    with pytest.raises(
        ValueError, match="must not be named as the installed module json; rename it"
    ):
        extension.load(str(named))
    assert json.loads("1") == 1
