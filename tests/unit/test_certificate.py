"""A claim is what was measured: a relaxed rule can never print exact."""

import pytest

from specmm.core.processors import Processor
from specmm.core.stats import Certificate, merged_certificate, rule_certificate


def test_kinds_follow_the_rule():
    assert rule_certificate("recursive", True, None).kind == "exact"
    assert rule_certificate("lantern", False, None).kind == "heuristic"
    relaxed = rule_certificate("lantern", False, 0.0)
    assert relaxed.kind == "bounded" and relaxed.tv == 0.0, (
        "an excess of zero is still a measurement, not a proof"
    )
    assert "at most 0.0250 on" in str(rule_certificate("lantern", False, 0.025))
    assert "measured in every round" in str(rule_certificate("lantern", False, 0.025))
    for measured in (0.308535, 0.00001, 0.03955822):
        told = str(rule_certificate("lantern", False, measured)).split("at most ")[1]
        assert measured <= float(told.split()[0]) < measured + 1e-4


@pytest.mark.parametrize(("kind", "tv"), [("bounded", None), ("heuristic", 0.1)])
def test_contradictions_are_refused(kind, tv):
    with pytest.raises(ValueError, match="certificate must"):
        Certificate(kind, "because", tv)


def test_runs_together_may_claim_the_least_of_them():
    exact = rule_certificate("recursive", True, None)
    low = rule_certificate("l", False, 0.01)
    high = rule_certificate("l", False, 0.04)
    assert merged_certificate([(exact, 10), (exact, 3)]) == exact
    assert merged_certificate([(low, 300), (high, 100)]).tv == pytest.approx(0.0175)
    assert merged_certificate([(exact, 100), (high, 100)]).tv == pytest.approx(0.02)
    found = merged_certificate([(exact, 1), (rule_certificate("l", False, None), 1), (low, 1)]).kind
    assert found == "heuristic"


def test_a_claim_names_the_settings_it_is_about():
    claim = rule_certificate("recursive", True, None).under(Processor(0.7, top_k=9).settings)
    assert claim.as_dict()["settings"] == {"temperature": 0.7, "top_k": 9}
    assert str(claim).endswith("(the model at temperature 0.7, top_k 9)")
    assert merged_certificate([(claim, 1), (claim, 2)]).settings == claim.settings
