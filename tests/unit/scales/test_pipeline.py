"""``VARPipeline``: methods, certificates, seeds, files, and every mistake a user can make."""

import dataclasses
import json

import pytest
import torch

from specmm import methods
from specmm.image_ar.files import save_module
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import VARSettings
from specmm.image_ar.scales.tuning import CoDePlan


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(pipe, method, classes=(3, "class7", 0), **options):
    options = {"output_type": "latent", "generator": seeded()} | options
    return pipe(classes=list(classes), method=method, **options)


def test_pictures(pipe):
    out = draw(pipe, "ar", output_type="uint8", num_images_per_prompt=2)
    assert out.images.shape == (6, 12, 12, 3) and out.tokens.shape == (6, 66)
    assert out.certificate.kind == "exact" and out.method == "ar"
    assert out.stats.tokens == 6 * 66 and out.stats.rounds == 30 and out.stats.seconds > 0
    assert draw(pipe, "ar", output_type="pil").images[0].size == (12, 12)


@pytest.mark.parametrize("method", ["ar", methods.CoDe(2)])
def test_a_picture_depends_on_its_seed_only(pipe, method):
    together = draw(pipe, method, generator=[seeded(1), seeded(2), seeded(3)]).tokens
    split = draw(pipe, method, generator=[seeded(1), seeded(2), seeded(3)], batch_size=2).tokens
    last = draw(pipe, method, ["class0"], generator=[seeded(3)]).tokens
    assert torch.equal(together, split) and torch.equal(together[2:], last)


@pytest.mark.parametrize("method, scale", [("ar", 0), (methods.CoDe(2), 2)])
def test_logits_that_are_not_finite_stop_the_run(pipe, make, method, scale):
    broken = make.var(0, depth=4)
    broken.head.bias.data[3] = float("nan")
    models = (pipe.transformer, broken) if method == methods.CoDe(2) else (broken, pipe.small)
    poisoned = VARPipeline(models[0], pipe.vae, models[1], pipe.settings)
    said = f"NaN or infinity from VAR of depth 4 in scale {scale}, check its weights"
    with pytest.raises(ValueError, match=said):
        draw(poisoned, method)


def test_code_certificates_and_ends(pipe, large, small, vqvae):
    plain = draw(pipe, "ar").tokens
    for n in range(6):
        out = draw(pipe, methods.CoDe(n))
        assert out.certificate.kind == ("exact" if n == 5 else "heuristic")
        coarse = large.config.schedule.starts[n]
        assert torch.equal(out.tokens[:, :coarse], plain[:, :coarse])
        assert n == 5 or not torch.equal(out.tokens, plain)
    alone = VARPipeline(small, vqvae, None, pipe.settings)
    assert torch.equal(draw(pipe, methods.CoDe(0)).tokens, draw(alone, "ar").tokens)


def test_code_works_only_where_needed(pipe, large, small):
    heads = {large: [], small: []}
    hooks = [
        m.head.register_forward_hook(
            lambda _, inputs, __, rows=rows: rows.append(tuple(inputs[0].shape[:2]))
        )
        for m, rows in heads.items()
    ]
    draw(pipe, methods.CoDe(3))
    for hook in hooks:
        hook.remove()
    assert heads[large] == [(3, 1), (3, 4), (3, 9)] and heads[small] == [(3, 16), (3, 36)]


def test_an_interrupted_run_leaves_nothing_after(pipe, large):
    before, wanted = large.state_dict().keys(), draw(pipe, "ar").tokens

    def stop(*_):
        raise KeyboardInterrupt

    for method in ("ar", methods.CoDe(2)):
        with pytest.raises(KeyboardInterrupt):
            draw(pipe, method, callback_on_step_end=stop)
        assert large.state_dict().keys() == before
        assert torch.equal(draw(pipe, "ar").tokens, wanted)


def test_callback_sees_every_scale(pipe):
    seen = []
    draw(pipe, methods.CoDe(2), callback_on_step_end=lambda pipe, i, k, kwargs: seen.append((i, k)))
    assert seen == [(i, i + 1) for i in range(5)]


def test_temperature_by_scale_and_smooth(pipe):
    cool = draw(pipe, "ar", temperature=(0.0, 0.0, 0.0, 0.0, 1.0)).tokens
    greedy = draw(pipe, "ar", temperature=0.0).tokens
    assert torch.equal(cool[:, :30], greedy[:, :30]) and not torch.equal(cool, greedy)
    smooth = draw(pipe, "ar", more_smooth=True)
    assert smooth.tokens.shape == greedy.shape
    assert not torch.equal(smooth.tokens, draw(pipe, "ar").tokens)


def test_code_without_n_takes_the_planners(pipe):
    out = draw(pipe, "code")
    made = pipe.measured_plans[3, pipe.target()]
    assert isinstance(made, CoDePlan) and out.method == f"code: {made.reason}"
    assert torch.equal(out.tokens, draw(pipe, methods.CoDe(made.n)).tokens)
    found = made.as_dict()
    assert len(found["by_n"]) == 6 and json.dumps(found) and len(made.lines()) == 7


def test_one_call_takes_one_n(pipe):
    out = draw(pipe, "code", batch_size=2)
    assert list(pipe.measured_plans) == [(2, pipe.target())], (
        "the batch left over is not planned for"
    )
    n = pipe.measured_plans[2, pipe.target()].n
    assert torch.equal(out.tokens, draw(pipe, methods.CoDe(n), batch_size=2).tokens)


def test_specialised_models_are_planned_as_they_are_run(pipe, vqvae, large, small, tmp_path):
    special = VARPipeline(
        large, vqvae, small, dataclasses.replace(pipe.settings, n=1, fid={"1": 3.0})
    )
    made = special.plan(3)
    assert made.n == 1 and "specialised" in made.reason
    assert draw(special, "code").method == f"code: {made.reason}"
    special.save_pretrained(tmp_path / "model")
    save_module(small, tmp_path / "other")
    again = VARPipeline.from_pretrained(tmp_path / "model", small=tmp_path / "other")
    assert again.settings == dataclasses.replace(special.settings, n=-1, fid={}), (
        "they were another small model's"
    )


def test_schedules_that_begin_with_many_tokens(make):
    models = [make.var(seed, depth=1, patch_nums=(10, 12)) for seed in (0, 1)]
    made = VARPipeline(models[0], make.vqvae((10, 12)), models[1], VARSettings())
    plain = draw(made, "ar", [3], temperature=0.0).tokens
    assert torch.equal(draw(made, "auto", [3], temperature=0.0).tokens, plain)


def test_auto_decodes_plainly(pipe):
    out = draw(pipe, "auto")
    assert out.certificate.kind == "exact"
    assert out.method == "auto: plain decoding: no other method is exact"


def test_files(pipe, large, vqvae, small, tmp_path):
    pipe.save_pretrained(tmp_path / "model")
    again = VARPipeline.from_pretrained(tmp_path / "model", torch_dtype=torch.float32)
    assert again.settings == pipe.settings and again.small is not None
    assert torch.equal(draw(again, methods.CoDe(2)).tokens, draw(pipe, methods.CoDe(2)).tokens)
    assert json.loads((tmp_path / "model" / "model_index.json").read_text())["family"] == "var"
    VARPipeline(small, vqvae, None, pipe.settings).save_pretrained(tmp_path / "small")
    given = VARPipeline.from_pretrained(
        tmp_path / "model", methods.CoDe(1), torch.float32, tmp_path / "small"
    )
    assert torch.equal(draw(given, None).tokens, draw(pipe, methods.CoDe(1)).tokens)
    save_module(small, tmp_path / "weights")
    found = VARPipeline.from_pretrained(tmp_path / "model", small=tmp_path / "weights").small.config
    assert found == small.config


def test_published_files(pipe, large, small, vqvae, tmp_path):
    for name, model in (("var", large), ("vae", vqvae), ("refiner", small)):
        torch.save(model.state_dict(), tmp_path / f"{name}.pth")
    files = [tmp_path / f"{name}.pth" for name in ("var", "vae", "refiner")]
    made = VARPipeline.from_files(*files, settings=pipe.settings, method=methods.CoDe(2))
    assert torch.equal(draw(made, None).tokens, draw(pipe, methods.CoDe(2)).tokens)


def test_half_precision(pipe, tmp_path):
    pipe.save_pretrained(tmp_path / "model")
    half = VARPipeline.from_pretrained(tmp_path / "model", torch_dtype=torch.bfloat16)
    assert half.transformer.dtype == torch.bfloat16
    assert half.vae.quantize.embedding.weight.dtype == torch.float32
    for method in ("ar", methods.CoDe(2)):
        assert draw(half, method, output_type="uint8").images.shape == (3, 12, 12, 3)
    with pytest.raises(ValueError, match="float16 must run on a GPU"):
        VARPipeline.from_pretrained(tmp_path / "model", torch_dtype=torch.float16)
    with pytest.raises(ValueError, match="float16 must run on a GPU"):
        draw(half.to(torch.float16), "ar")
    assert half.to(torch.bfloat16).vae.quantize.embedding.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(method=methods.CoDe(6)), r"n must be a whole number from 0 .* to 5 .*, got 6"),
        (dict(temperature=0.0, more_smooth=True), "more_smooth must be off at temperature 0"),
        (dict(temperature=[1.0, 1.0]), "temperature must be one or one for each of 5 scales"),
        (
            dict(method=methods.CoDe(2, release=True), temperature=0.0),
            "temperature must be above 0",
        ),
        (dict(method=methods.CoDe(2, release=True), more_smooth=True), "more_smooth must be off"),
        (
            dict(method=methods.CoDe(2, release=True), num_images_per_prompt=9),
            "batch_size of at least 9, got batch_size 8",
        ),
        (
            dict(method=methods.CoDe(2, release=True), generator=[seeded()]),
            "release draws one batch from one generator",
        ),
        (dict(method=methods.CoDe(-2)), "got -2"),
        (dict(top_k=33), "top_k must be at most the codebook size 32, got 33"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (dict(cfg=-1.0), "cfg must be finite and at least 0, got -1.0"),
        (dict(temperature=(1.0, 1.0)), "temperature must be one or one for each of 5 scales"),
        (dict(classes=["class77"]), "did you mean 'class7'"),
        (dict(classes=[10]), "class id must be below 10, got 10"),
        (dict(classes=[]), "classes must name at least one class"),
        (dict(method="cod"), "did you mean 'code'"),
        (dict(output_type="jpg"), "unknown output_type 'jpg'"),
    ],
)
def test_bad_options(pipe, options, message):
    options = {"classes": [1], "output_type": "latent"} | options
    with pytest.raises(ValueError, match=message):
        pipe(**options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(patch_nums=(1, 2, 3, 4, 5)), "two models must share patch_nums"),
        (dict(num_classes=11), "two models must share num_classes, got 10 .large. and 11 .small."),
        (dict(vocab_size=64), "two models must share vocab_size"),
    ],
)
def test_models_that_do_not_fit(make, large, vqvae, sizes, message):
    with pytest.raises(ValueError, match=message):
        VARPipeline(large, vqvae, make.var(2, depth=1, **sizes))


def test_tokenizers_that_do_not_fit(make, large, small, vqvae, pipe, tmp_path):
    said = "transformer and tokenizer must share vocab_size, got 32 and 16"
    with pytest.raises(ValueError, match=said):
        VARPipeline(large, make.vqvae(codes=16))
    pipe.save_pretrained(tmp_path / "large")
    VARPipeline(small, make.vqvae(seed=1), None).save_pretrained(tmp_path / "small")
    for given in ("small", "small/transformer", "small/transformer/model.safetensors"):
        with pytest.raises(ValueError, match="two models must share their tokenizer"):
            VARPipeline.from_pretrained(tmp_path / "large", small=tmp_path / given)
    own = tmp_path / "large" / "small" / "model.safetensors"
    assert VARPipeline.from_pretrained(tmp_path / "large", small=own).small.config == small.config


def test_missing_small_model(pipe, large, vqvae):
    alone = VARPipeline(
        large, vqvae, None, dataclasses.replace(VARSettings(), classes=pipe.settings.classes)
    )
    for method in ("code", methods.CoDe(2)):
        with pytest.raises(ValueError, match="needs a small model"):
            draw(alone, method)
    with pytest.raises(ValueError, match="text_encoder must be left out"):
        VARPipeline.from_pretrained("anything", text_encoder="t5")
