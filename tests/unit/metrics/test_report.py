"""The report: result files of every kind, what does not fit together, and names that stay clear in
the picture.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from specmm.metrics.measurement import Interval, Measurement, compare_results, read_measurements
from specmm.metrics.report import COLUMNS, draw_trade, joined, read_files, table

BENCH = [
    {"method": label.partition("(")[0], "label": label, "speedup": x, "certificate": {"kind": kind}}
    for label, x, kind in (("ar", 1.0, "exact"), ("lantern++(k=10)", 2.0, "bounded"))
]


def fid(value: float, **protocol: Any) -> Measurement:
    interval = Interval(value - 1, value + 1, 0.95, "jackknife")
    return Measurement(
        "fid", value, {"features": "inception", **protocol, "counts": [100, 100]}, interval=interval
    )


def written(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_bench_and_eval_files_make_one_table(tmp_path: Path) -> None:
    speed = written(tmp_path / "bench.json", BENCH)
    plain = written(tmp_path / "ar.json", fid(10.0).to_json())  # the file's name is the method's
    relaxed = written(tmp_path / "x.json", {**fid(11.0).to_json(), "name": "lantern++(k=10)"})
    rows = joined(*read_files([relaxed, speed, plain]))
    wanted = [("ar", 1, 100), ("lantern++(k=10)", 1.1, 100)]
    assert [(r["method"], r["fid_ratio"], r["samples"]) for r in rows] == wanted
    text = table(rows, COLUMNS)
    assert "| lantern++(k=10) | 2.000 | bounded | 100 | 11.0 | 10.0 | 12.0 | 1.100 |" in text


def test_benchmark_files_with_their_comments(tmp_path: Path) -> None:
    mark = "\ufeff"  # as editors of Windows put it before a text
    (tmp_path / "speed.csv").write_text(
        f"{mark}# cores: 2\r\nmethod,speedup,certificate\r\nar,1.0,exact\r\n", encoding="utf-8"
    )
    (tmp_path / "quality.csv").write_text(
        'method,fid,samples\nar,12.5,2000\n"real, halves",3.5,2000\n'
    )
    rows = joined(*read_files([tmp_path / "speed.csv", tmp_path / "quality.csv"]))
    speed = {"method": "ar", "speedup": 1.0, "certificate": "exact"}
    assert rows == [speed | {"fid": 12.5, "samples": 2000, "fid_ratio": 1.0}]
    slow = {"environment": {}, "rows": [{"method": "ar", "speedup": 3.0}]}
    whole = written(tmp_path / "speed.json", slow)
    whole.write_text(mark + whole.read_text(), encoding="utf-8")
    assert read_files([whole])[0][0]["speedup"] == 3


def test_what_does_not_fit_together(tmp_path: Path) -> None:
    one = written(tmp_path / "one.json", fid(10).to_json())
    other = written(tmp_path / "other.json", fid(10, features="efficientnet").to_json())
    with pytest.raises(ValueError, match="features='inception' and 'efficientnet'"):
        read_files([one, other])
    said = r"speeds of ar, lantern.*FIDs of one; give eval the method's name"
    with pytest.raises(ValueError, match=said):
        joined(*read_files([written(tmp_path / "bench.json", BENCH), one]))
    (tmp_path / "odd.csv").write_text("a,b\n1,2\n")
    (tmp_path / "odd.json").write_text("{")
    for name, message in (
        ("odd.csv", "must have columns"),
        ("odd.json", "must be JSON"),
        ("odd.txt", "json or .csv"),
    ):
        with pytest.raises(ValueError, match=message):
            read_files([tmp_path / name])
    with pytest.raises(ValueError, match="must hold a result of specmm eval"):
        read_files([written(tmp_path / "x.json", {"a": 1})])


def test_a_difference_of_two_results(tmp_path: Path) -> None:
    found = compare_results(fid(13), fid(10))
    assert found.value == 3 and found.differ
    assert found.interval is not None
    # by hand: 1, 1
    assert (found.interval.low, found.interval.high) == pytest.approx((3 - 2**0.5, 3 + 2**0.5))
    assert not compare_results(fid(11), fid(10)).differ
    assert compare_results(Measurement("kid", 1.0, {}), Measurement("kid", 0.5, {})).differ is None
    with pytest.raises(ValueError, match="same protocol, got resize="):
        compare_results(fid(1, resize="a"), fid(1, resize="b"))
    several = written(tmp_path / "pr.json", {"results": [fid(1).to_json(), fid(2).to_json()]})
    assert [m.value for m in read_measurements(several)] == [1, 2]


ROWS = [
    {"method": "ar", "speedup": 1.0, "fid": 69.8, "certificate": "exact", "samples": 2000},
    *(
        {
            "method": f"lantern++(lambda_={i}.0, k={10 * i})",
            "speedup": 1.8 + i / 20,
            "fid": 70 + i,
            "certificate": "tv",
        }
        for i in range(6)
    ),
]


def test_no_name_lies_on_the_plot_or_leaves_the_picture(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig

    def kept(figure, *given, **options):
        save(figure, *given, **options)
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", kept)
    rows = [{**r, "fid_low": r["fid"] - 1, "fid_high": r["fid"] + 1} for r in ROWS]
    assert draw_trade(rows, tmp_path / "x.png", floor=18).stat().st_size > 10_000
    [figure], [axes], [names] = drawn, drawn[0].axes, drawn[0].legends
    told = [text.get_text() for text in names.get_texts()]
    assert told[:3] == ["plain decoding", "plain decoding + 10%", "real against real (halves)"]
    methods = [r["method"] for r in ROWS]
    assert told[3:] == [f"{methods[0]}, n = 2000", *methods[1:]]
    box, whole, plot = names.get_window_extent(), figure.bbox, axes.get_tightbbox()
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= plot.y0
