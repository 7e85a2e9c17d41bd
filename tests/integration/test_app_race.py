"""The app shows what the pipelines make, on a clock that counts the methods' seconds alone."""

import os
import re
import time
from html import unescape
from pathlib import Path

import pytest
import torch
from PIL import ImageColor

import specmm
from specmm import methods, zoo
from specmm.app.clock import Stopwatch, race, verdict
from specmm.app.fields import Trace, raced
from specmm.app.lanes import LaneWatch, PictureLane, TextLane, generator
from specmm.app.models import STARTS, AppModels, changed, twin
from specmm.app.trace import drawing_of, rows_of
from specmm.app.views import (
    DRAFTED,
    OWN,
    WAITING,
    counted,
    grid,
    line,
    marked,
    preview,
    raster,
    saved,
    tokens_of,
)
from specmm.core.watching import watched
from tests.tiny import picture_kinds

FAST = methods.Speculative()


def picture_lane(pipe, method, **call):
    return PictureLane(pipe, method, {"generator": generator(pipe, 3), **call})


def finished(lanes, at_a_time=0.04):
    for _ in race(lanes, 100.0, at_a_time):
        pass
    for lane in lanes:
        lane.close()
    return lanes


@pytest.fixture
def pipe(make_tiny):
    made = make_tiny()
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def text_pipe(text_folder):
    return specmm.TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)


# ---- the race


def test_racing_pictures_are_those_of_plain_calls(pipe):
    other = twin(pipe)
    lanes = [picture_lane(p, m, classes=["heart"]) for p, m in ((pipe, "ar"), (other, FAST))]
    for lane in finished(lanes):
        alone = pipe(classes=["heart"], generator=generator(pipe, 3), method=lane.method)
        assert torch.equal(lane.out.tokens, alone.tokens)
        assert str(lane.out.certificate) == str(alone.certificate)


def test_a_twin_shares_the_weights_and_nothing_else(pipe):
    other = twin(pipe)
    for one, two in ((pipe.transformer, other.transformer), (pipe.vq, other.vq)):
        pairs = zip(one.parameters(), two.parameters(), strict=True)
        assert one is not two and all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    heads = zip(pipe.parts.drafters.values(), other.parts.drafters.values(), strict=True)
    assert all(
        a.data_ptr() == b.data_ptr()
        for one, two in heads
        for a, b in zip(one.parameters(), two.parameters(), strict=True)
    )


def test_both_clocks_advance_together_and_views_cost_nothing(pipe):
    lanes = [picture_lane(p, "ar", classes=["heart"]) for p in (pipe, twin(pipe))]
    rests = 0
    begin = time.perf_counter()
    for lane in lanes:
        lane.advance(0.0)
    while any(lane.out is None for lane in lanes):
        behind = min(lanes, key=lambda lane: (lane.out is not None, lane.clock.seconds))
        before = behind.clock.seconds
        time.sleep(0.05)  # a view
        rests += 1
        assert behind.clock.seconds == before  # it stood
        behind.advance(0.02)
    counted = sum(lane.clock.seconds for lane in lanes)
    assert 0 < counted <= time.perf_counter() - begin - 0.05 * rests
    for lane in lanes:
        lane.close()


def test_the_lane_behind_runs_next(pipe):
    lanes = [picture_lane(p, m, classes=["heart"]) for p, m in ((pipe, "ar"), (twin(pipe), FAST))]
    turns = []
    for i, lane in enumerate(lanes):
        lane.advance = lambda s, i=i, run=lane.advance: (
            turns.append((i, [each.clock.seconds for each in lanes])),
            run(s),
        )
    finished(lanes, 0.001)
    both = [(i, seconds) for i, seconds in turns if all(x > 0 for x in seconds)]
    assert len(both) > 3 and {i for i, _ in both} == {0, 1}
    ended = min(range(2), key=lambda i: lanes[i].clock.seconds)
    for i, seconds in both:
        if seconds[ended] < lanes[ended].clock.seconds:
            assert seconds[i] == min(seconds)


def test_a_pause_within_a_run_does_not_count():
    clock = Stopwatch()
    begin = time.perf_counter()
    with clock.running(), clock.paused():
        time.sleep(0.2)
    assert clock.seconds <= time.perf_counter() - begin - 0.2


def test_a_drawing_that_is_left_stops(pipe):
    lane = picture_lane(pipe, "ar", classes=["heart"])
    lane.advance(0.0)
    lane.close()
    assert lane.out is None and lane._ended.is_set()
    assert pipe(classes=["heart"], method="ar").images  # its turn has been given back


def test_a_mistake_on_one_side_ends_the_race(pipe):
    lanes = [picture_lane(p, m, classes=["hart"]) for p, m in ((pipe, "ar"), (twin(pipe), FAST))]
    with pytest.raises(ValueError, match="did you mean"):
        finished(lanes)
    for lane in lanes:
        lane.close()


def test_a_race_that_takes_too_long_says_so(pipe):
    lane = picture_lane(pipe, "ar", classes=["heart"])
    with pytest.raises(ValueError, match="may take 0 seconds"):
        list(race([lane], 0.0))
    lane.close()


def test_who_was_faster():
    assert verdict(["ar", "sjd"], [3.0, 1.5]) == "sjd was 2.00 times as fast as ar"
    assert verdict(["ar", "sjd"], [1.0, 1.5]) == "ar was 1.50 times as fast as sjd"
    both = "sjd on both sides: one took 1.50 times as long as the other"
    assert verdict(["sjd", "sjd"], [1.0, 1.5]) == both


@pytest.mark.parametrize("method", ["ar", "block", "deer"])
def test_racing_texts_are_those_of_plain_calls(text_pipe, method):
    options = dict(max_new_tokens=20, seed=1, method=method, temperature=1.0)
    lanes = [
        TextLane(text_pipe, m, lambda m=m: text_pipe.begin("def add(", **{**options, "method": m}))
        for m in (method, "ar")
    ]
    lane, _ = finished(lanes)
    alone = text_pipe("def add(", **options)
    assert "".join(text for text, _ in lane.pieces) == alone.texts[0]
    assert lane.out.stats.tau == alone.stats.tau
    assert str(lane.out.certificate) == str(alone.certificate)


def test_prompts_of_models_that_draw_from_them(tmp_path):
    picture_kinds.KINDS["janus"].save(tmp_path)
    models = AppModels((str(tmp_path),), only=())
    own = models.parameters("images", str(tmp_path))
    given = changed(own, {"cfg": "2.0", "height": "12", "width": "12", "top_k": str(own["top_k"])})
    assert given == {"cfg": 2.0, "height": 12, "width": 12}
    pipes = (models.get("images", str(tmp_path)), models.twin(str(tmp_path)))
    call = dict(prompt=["a red barn"], **given)
    lanes = [picture_lane(p, m, **call) for p, m in zip(pipes, ("ar", "sjd"), strict=True)]
    for lane in finished(lanes):
        alone = pipes[0](generator=generator(pipes[0], 3), method=lane.method, **call)
        assert torch.equal(lane.out.tokens, alone.tokens)


# ---- what is shown


def test_cells_show_what_was_accepted():
    assert raster([3, 4, 8], 9) == [0, 1, 0, 0, 1, 1, 1, 0, None]
    picture = grid([0.0, 1.0, None, 0.5], 2)
    colours = [picture.getpixel(xy) for xy in ((3, 3), (19, 3), (3, 19))]
    assert colours == [ImageColor.getrgb(name) for name in (OWN, DRAFTED, WAITING)]
    assert picture.getpixel((19, 18)) != picture.getpixel((19, 29))  # half of each


def test_mars_cells_are_the_calls_that_tokens_waited_for():
    pipe = specmm.ImagePipeline.from_pretrained("pocket/mar")
    pipe.set_progress_bar_config(disable=True)
    call = dict(classes=["heart"], num_iter=4, head_steps=20)
    plain, fast = finished(
        [picture_lane(pipe, "ar", **call), picture_lane(twin(pipe), "cspd", **call)]
    )
    for lane in (plain, fast):
        assert sum(told.calls for told in lane.watch.calls) == lane.out.stats.head_calls
        places = torch.cat([told.places[0] for told in lane.watch.calls]).sort().values
        assert torch.equal(places, torch.arange(pipe.grid**2))
        assert tokens_of(lane) is not None and preview(lane) is not None
    assert counted(plain) == "20 head calls a token for 20 steps (1.0 a call)"
    assert fast.out.stats.head_calls < plain.out.stats.head_calls
    assert counted(fast) != counted(plain)


def test_vars_scales_are_told_apart_and_previewed():
    pipe = specmm.ImagePipeline.from_pretrained("pocket/var")
    pipe.set_progress_bar_config(disable=True)
    lane = picture_lane(pipe, methods.CoDe(n=2), classes=["heart"])
    lane.advance(0.0)
    first = preview(lane)
    [lane] = finished([lane])
    assert first is not None and lane.out.images
    assert counted(lane) == "scales: 2 by the large model, 5 by the small model"
    assert "heuristic" in line(lane, "code", 7)


def test_saved_pictures_do_not_pile_up(pipe):
    out = pipe(classes=["heart"], generator=generator(pipe, 3))
    old, new = (Path(saved(out, "heart", seed)) for seed in (3, 4))
    os.utime(old.parent, (0, 0))
    last = Path(saved(out, "heart", 5))
    assert not old.parent.exists() and new.is_file() and last.is_file()


def test_a_picture_made_of_all_scales_is_the_picture():
    pipe = specmm.ImagePipeline.from_pretrained("pocket/var")
    pipe.set_progress_bar_config(disable=True)
    [lane] = finished([picture_lane(pipe, "ar", classes=["heart"])])
    whole = preview(lane)
    lane.out = None  # as if only the last scale had been told
    assert preview(lane).tobytes() == whole.tobytes()


def test_marks_leave_words_whole():
    text = [("de", True), ("f <a", True), (">(b)\n", False), (" x", True)]
    found = marked(text)
    assert found.count("<mark>") == 2 and "<a" not in found
    assert unescape(re.sub("<.*?>", "", found)) == "".join(part for part, _ in text)


# ---- one round


def test_a_trace_is_what_the_run_kept(pipe):
    watch = LaneWatch()
    with watch.clock.running(), watched(watch):
        out = pipe(classes=["heart"], generator=generator(pipe, 3), method=FAST)
    assert len(watch.rounds) == out.stats.rounds > 3
    made = [out.tokens[0, 0].item()]
    for nodes in watch.rounds:
        assert nodes[0].token == made[-1] and nodes[0].parent == -1
        made += [node.token for node in nodes[1:] if node.kept]
        for node in nodes[1:]:
            assert 0 <= node.accept <= 1 and 0 <= node.p <= 1
            assert not node.kept or nodes[node.parent].kept
    assert made[: out.tokens.shape[1]] == out.tokens[0].tolist()


def test_chances_of_a_chain_are_the_ratio_of_target_and_drafter(pipe):
    watch = LaneWatch()
    method = methods.Speculative(tree=(1, 1), rule="recursive")
    with watch.clock.running(), watched(watch):
        pipe(classes=["heart"], generator=generator(pipe, 3), method=method)
    drafts = [node for nodes in watch.rounds for node in nodes[1:] if node.drafted]
    assert len(drafts) > 10
    for node in drafts:
        assert node.accept == pytest.approx(min(1.0, node.p / node.q), rel=1e-4)


def test_a_trace_for_people(pipe):
    lanes = finished([picture_lane(pipe, FAST, classes=["heart"])])
    trace = Trace.of(["speculative"], lanes, str)
    nodes = trace.rounds[trace.longest - 1]
    drawing = drawing_of(nodes, str)
    assert drawing.count("<circle") == len(nodes) and 'role="img"' in drawing
    rows = rows_of(nodes, str)
    assert rows[-1][-1] == "the target's own" and len(rows) == len(nodes) - 1
    assert "<table>" in trace.shown(trace.longest)
    assert Trace.of(["ar"], finished([picture_lane(pipe, "ar", classes=["heart"])]), str) == Trace()


# ---- models and settings


def test_only_listed_models_are_loaded_where_strangers_are():
    with pytest.raises(ValueError, match="model must be one of"):
        AppModels().get("images", "/etc")
    with pytest.raises(ValueError, match="no/such"):
        AppModels(("no/such",))
    assert "pocket/llava" in AppModels().names["questions"]
    assert set(AppModels().names["images"]) <= set(zoo.pocket_models())


def test_any_model_is_loaded_where_that_is_allowed(tiny, text_folder):
    models = AppModels(only=(), anything=True)
    assert models.get("images", str(tiny)).takes == "classes"
    with pytest.raises(ValueError, match="is a model of text, not of images"):
        models.get("images", str(text_folder))


def test_parameters_of_another_kind_are_a_sentence():
    own = {"cfg": 1.5, "top_k": 0, "more_smooth": False, "height": None}
    found = changed(own, {"cfg": "1.5", "top_k": "", "more_smooth": "True", "height": "64"})
    assert found == {"more_smooth": True, "height": 64}
    with pytest.raises(ValueError, match="top_k must be a value such as 0, got 'many'"):
        changed(own, {"top_k": "many"})


def test_menus_have_what_a_model_can_be_run_by(tiny, text_folder):
    models = AppModels((str(tiny), str(text_folder)), only=())
    assert {"ar", "speculative", "lantern++"} <= set(models.methods("images", str(tiny)))
    found = models.methods("text", str(text_folder))
    assert {"ar", "auto", "block", "deer"} <= set(found) and "eagle3" not in found


@pytest.mark.slow
def test_pocket_models_start_with_what_they_know():
    models = AppModels()
    for kind in ("images", "questions", "text"):
        for name in models.names[kind]:
            start = STARTS[name]
            assert start.method.split("(")[0] in models.methods(kind, name)
            if kind == "images":
                assert start.asked in models.get(kind, name).settings.classes


def test_the_first_rounds_of_a_method_do_not_count(pipe, tiny):
    models = AppModels((str(tiny),), only=())
    made = []

    def lane():
        made.append(picture_lane(pipe, "ar", classes=["heart"]))
        return made[-1]

    for _ in range(2):
        for _ in raced(models, ["key"], [lane]):
            pass
    assert [each.out is None for each in made] == [True, False, False]  # warmed up once
