import json

import pytest

from specmm.metrics.measurement import Interval, Measurement, difference


def measured(value: float, metric: str = "fid", **protocol: object) -> Measurement:
    return Measurement(metric, value, dict(protocol))


def test_json_round_trip() -> None:
    one = Measurement(
        "fid",
        1.5,
        {"counts": [3, 4]},
        {"mean_term": 1.0},
        Interval(1.0, 2.0, 0.95, "bootstrap of 9"),
    )
    assert Measurement.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert Measurement.from_json(measured(2.0).to_json()) == measured(2.0)
    with pytest.raises(ValueError, match="got no metric, protocol"):
        Measurement.from_json({"value": 1.0})


def test_difference_names_what_differs() -> None:
    one = measured(3.0, resize="antialias", counts=[10, 10])
    assert (
        difference(one, measured(1.0, resize="antialias", counts=[20, 10], note="few", files={}))
        == 2.0
    )
    with pytest.raises(ValueError, match="resize='antialias' and 'none'"):
        difference(one, measured(1.0, resize="none"))
    with pytest.raises(ValueError, match="'weights' in one only"):
        difference(one, measured(1.0, resize="antialias", weights="a"))
    with pytest.raises(ValueError, match="same metric, got fid and kid"):
        difference(one, measured(1.0, "kid", resize="antialias"))
