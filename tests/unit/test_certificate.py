"""A claim is what was measured: a relaxed rule can never print exact."""

import pytest

from specmm.certificate import Certificate, merged, of_rule
from specmm.processors import Processor


def test_kinds_follow_the_rule():
    assert of_rule("recursive", True, None).kind == "exact"
    assert of_rule("lantern", False, None).kind == "heuristic"
    relaxed = of_rule("lantern", False, 0.0)
    assert relaxed.kind == "bounded" and relaxed.tv == 0.0, (
        "an excess of zero is still a measurement, not a proof"
    )
    assert "below 0.0250" in str(of_rule("lantern", False, 0.025))


@pytest.mark.parametrize(("kind", "tv"), [("bounded", None), ("heuristic", 0.1)])
def test_contradictions_are_refused(kind, tv):
    with pytest.raises(ValueError, match="certificate must"):
        Certificate(kind, "because", tv)


def test_runs_together_may_claim_the_least_of_them():
    exact, low, high = (
        of_rule("recursive", True, None),
        of_rule("l", False, 0.01),
        of_rule("l", False, 0.04),
    )
    assert merged([(exact, 10), (exact, 3)]) == exact
    assert merged([(low, 300), (high, 100)]).tv == pytest.approx(0.0175)
    assert merged([(exact, 100), (high, 100)]).tv == pytest.approx(0.02)
    assert merged([(exact, 1), (of_rule("l", False, None), 1), (low, 1)]).kind == "heuristic"


def test_a_claim_names_the_settings_it_is_about():
    claim = of_rule("recursive", True, None).under(Processor(0.7, top_k=9).settings)
    assert claim.as_dict()["settings"] == {"temperature": 0.7, "top_k": 9}
    assert str(claim).endswith("(the model at temperature 0.7, top_k 9)")
    assert merged([(claim, 1), (claim, 2)]).settings == claim.settings
