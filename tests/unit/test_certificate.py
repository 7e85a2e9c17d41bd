"""A claim is what was measured: a relaxed rule can never print exact."""

import pytest

from specmm.certificate import Certificate, of_rule


def test_kinds_follow_the_rule():
    assert of_rule("recursive", True, None).kind == "exact"
    assert of_rule("lantern", False, None).kind == "heuristic"
    relaxed = of_rule("lantern", False, 0.0)
    assert relaxed.kind == "bounded" and relaxed.tv == 0.0, "an excess of zero is still a measurement, not a proof"
    assert "below 0.0250" in str(of_rule("lantern", False, 0.025))


@pytest.mark.parametrize(("kind", "tv"), [("bounded", None), ("heuristic", 0.1)])
def test_contradictions_are_refused(kind, tv):
    with pytest.raises(ValueError, match="certificate must"):
        Certificate(kind, "because", tv)
