"""Methods by name, their options, and their spelling on the command line."""

import pytest

from specmm import methods
from specmm.runs.method_names import label, parse_method, parse_methods


def test_names_lead_to_methods() -> None:
    assert methods.resolve("lantern++", k=5) == methods.LanternPP(k=5)
    assert methods.resolve(methods.LanternPP(k=5), lambda_=3.0) == methods.LanternPP(
        lambda_=3.0, k=5
    )
    for name in methods.IMAGE_TOKENS:
        assert methods.resolve(name).name == name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lantern+", {}, "did you mean 'lantern\\+\\+'"),
        ("qqqq", {}, "choose from: ar, auto, draft, eagle"),
        (
            "lantern++",
            {"lambd": 2},
            "unknown option of lantern\\+\\+ 'lambd'; did you mean 'lambda_'",
        ),
        ("ar", {"k": 2}, "unknown option of ar"),
    ],
)
def test_unknown_names_are_errors_that_suggest(
    name: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        methods.resolve(name, **options)


def test_options_from_text_have_their_types() -> None:
    assert parse_method(
        methods.IMAGE_TOKENS, "lantern++", ["lambda=3", "k=7"]
    ) == methods.LanternPP(lambda_=3.0, k=7)
    assert parse_method(methods.IMAGE_TOKENS, "lantern++", ["lambda-=3"]) == methods.LanternPP(
        lambda_=3.0
    )
    assert parse_method(
        methods.IMAGE_TOKENS, "speculative", ["rule=traversal", "tree=3,2,1"]
    ).tree == (3, 2, 1)
    assert parse_method(methods.IMAGE_TOKENS, "speculative", ["tree=(3, 2)"]).tree == (3, 2)
    assert parse_method(methods.IMAGE_TOKENS, "speculative", ["tree=4"]).tree == (4,)
    assert (
        parse_method(methods.IMAGE_TOKENS, "speculative", ["tree=mc_sim_7b_63"]).tree
        == "mc_sim_7b_63"
    )
    assert parse_method(methods.TEXT, "block", ["tree=8"]).tree == 8
    assert parse_method(methods.TEXT, "block", ["tree=2,1,1"]).tree == (2, 1, 1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("k=many", "k must be a whole number, got 'many'"),
        ("lambda_=x", "lambda_ must be a number"),
        ("residual=oficial", "did you mean 'official'"),
        ("k", "must read KEY=VALUE"),
        ("lamda_=2", "did you mean 'lambda_'"),
        ("tree=1.5,2", "whole numbers such as"),
    ],
)
def test_bad_options_from_text(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_method(methods.IMAGE_TOKENS, "lantern++", [option])


def test_lists_of_methods() -> None:
    found = parse_methods(
        methods.IMAGE_TOKENS, "ar, lantern++(lambda_=4, tree=(2,1)),sjd(window=4)"
    )
    assert found == [methods.AR(), methods.LanternPP(lambda_=4.0, tree=(2, 1)), methods.SJD(4)]
    assert [label(m) for m in found] == [
        "ar",
        "lantern++(lambda_=4.0, tree=(2, 1))",
        "sjd(window=4)",
    ]
    for wrong in ("", "lantern++(k=1", "ar,lanturn"):
        with pytest.raises(ValueError):
            parse_methods(methods.IMAGE_TOKENS, wrong)


def test_the_residual_of_lantern_and_its_old_name() -> None:
    for kind in (methods.Lantern, methods.LanternPP):
        assert kind().residual == "corrected" and "release" not in kind().choice.rule
        with pytest.warns(FutureWarning, match='"official" is called "release"'):
            old = methods.make(methods.IMAGE_TOKENS, kind.name, residual="official")
        assert old == kind(residual="release")
        assert old.choice.rule.startswith(f"{kind.name}-release(")
    with pytest.warns(FutureWarning):
        parse_method(methods.IMAGE_TOKENS, "lantern++", ["residual=official"])
