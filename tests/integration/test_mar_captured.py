"""MAR as graphs of a GPU, by the stand-in of one: the vectors of single operators."""

import pytest
import torch

from specmm import methods
from specmm.choose import when_compiled
from tests.integration.test_mar_compiled import draw, pipe, trained  # noqa: F401
from tests.integration.test_mar_pipeline import pipeline, seeds

WAYS = {
    "ar": (methods.AR(), 2, dict(num_iter=9)),
    "ar, guided": (methods.AR(), 1, dict(cfg=2.0, num_iter=9)),
    "ar, ddim": (methods.AR(), 2, dict(cfg=2.0, num_iter=9, solver="ddim")),
}


@pytest.mark.parametrize("name", WAYS)
def test_vectors_are_those_of_single_operators(trained, name, taped):  # noqa: F811
    method, count, options = WAYS[name]
    options = dict(head_steps="ddim10") | options  # the noisiest steps of others enlarge rounding
    plain, quick = (draw(trained, method, way, count, **options) for way in (False, True))
    assert (plain.compiled, quick.compiled) == ([False] * count, [True] * count)
    torch.testing.assert_close(quick.tokens, plain.tokens, atol=1e-4, rtol=1e-4)
    assert quick.stats.head_calls == plain.stats.head_calls
    assert quick.certificate == plain.certificate and quick.method == plain.method
    assert taped.records


def test_calls_share_graphs(pipe, taped):  # noqa: F811
    method = methods.AR()
    made = [draw(pipe, method, True, head_steps="ddim5", generator=seeds(k)) for k in (0, 1)]
    records, replays = taped.records, taped.replays
    again = draw(pipe, method, True, head_steps="ddim5", generator=seeds(0))
    assert torch.equal(again.tokens, made[0].tokens)
    assert not torch.equal(made[0].tokens, made[1].tokens)
    assert taped.records == records and taped.replays > replays


def test_another_temperature_solver_or_schedule_is_another_graph(pipe, taped):  # noqa: F811
    for options in ({}, dict(temperature=0.5), dict(solver="ddim"), dict(head_steps="ddim4")):
        options = dict(head_steps="ddim5") | options
        plain, quick = (draw(pipe, methods.AR(), way, **options) for way in (False, True))
        torch.testing.assert_close(quick.tokens, plain.tokens, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "most"), [("MOST", 20), ("MOST_BYTES", 12_000)])
def test_graphs_are_no_more_than_so_many(name, most, taped, monkeypatch):
    monkeypatch.setattr(f"specmm.image_ar.continuous.programs.{name}", most)
    made = pipeline()
    graphs = []
    for iterations in (9, 9, 10, 11):  # with those of chains 14, 14 and 24
        draw(made, methods.AR(), True, head_steps="ddim5", num_iter=iterations)
        graphs.append(made.graphs)
    assert graphs[0] is graphs[1] is graphs[2] is not graphs[3]


def test_weights_that_move_get_graphs_of_their_own(taped):
    made = pipeline()
    draw(made, methods.AR(), True, head_steps="ddim5")
    before = made.graphs
    layer = made.transformer.decoder_embed
    layer.weight.data = 2 * layer.weight.data
    plain, quick = (draw(made, methods.AR(), way, head_steps="ddim5") for way in (False, True))
    torch.testing.assert_close(quick.tokens, plain.tokens, atol=1e-4, rtol=1e-4)
    assert made.graphs is not before


def test_a_head_that_is_not_finite_is_noticed_after_a_replay(taped):
    made, method = pipeline(), methods.AR()
    draw(made, method, True, head_steps="ddim5")
    made.transformer.head.final_layer.linear.bias.data[:] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        draw(made, method, True, head_steps="ddim5")
    assert taped.replays


def test_tokens_whose_modulations_are_not_kept(pipe, taped, monkeypatch):  # noqa: F811
    """Chains are graphs all the same."""
    monkeypatch.setattr("specmm.image_ar.continuous.diffusion_head.TABLE_LIMIT", 100)
    plain, quick = (draw(pipe, methods.AR(), way, head_steps="ddim5") for way in (False, True))
    torch.testing.assert_close(quick.tokens, plain.tokens, atol=1e-4, rtol=1e-4)


def test_auto_captures_once_it_pays(pipe, taped, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path))
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    out = draw(pipe, methods.AR(), "auto", 3, batch_size=1, head_steps=5)
    assert out.compiled == [False, True, True]


def test_what_has_no_graphs(pipe, taped):  # noqa: F811
    for method in (methods.CSpD(), methods.CSpD("release")):
        with pytest.raises(ValueError, match="MAR on a GPU needs ar, which is faster there, got"):
            draw(pipe, method, True)
    out = draw(pipe, methods.CSpD(), "auto", 3, batch_size=1, head_steps=5)
    assert out.compiled == [False] * 3
