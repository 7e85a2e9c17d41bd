"""What users of diffusers type: every image pipeline takes it, and says what it does not take."""

import inspect

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.callbacks import PipelineCallback
from PIL import Image

import specmm
from specmm import methods
from specmm.image_ar.calls import Classes, listed

FAMILIES = ("tiny", "pocket/var", "pocket/mar")
QUICK = {"pocket/mar": dict(num_iter=2, head_steps=4)}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module", params=FAMILIES)
def pipe(request):
    tiny = request.param == "tiny"
    name = request.getfixturevalue("tiny") if tiny else request.param
    made = specmm.ImagePipeline.from_pretrained(name, torch_dtype=torch.float32)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture
def draw(pipe):
    def drawn(**options):
        given = {"generator": seeded(), **QUICK.get(pipe.name, {})} | options
        return pipe(**given)

    return drawn


def test_output_types(draw):
    """All of the same pictures; integers as they were, numbers in [0, 1], channels first for pt."""
    integers = draw(classes=[3], output_type="uint8").images
    assert integers.dtype == np.uint8 and integers.shape[0] == 1 and integers.shape[-1] == 3
    assert integers.std() > 1, "a flat picture would not tell one layout from another"
    floats = draw(classes=[3], output_type="np").images
    assert floats.dtype == np.float32 and 0 <= floats.min() <= floats.max() <= 1
    assert (np.round(floats * 255) == integers).all()
    tensors = draw(classes=[3], output_type="pt").images
    assert tensors.dtype == torch.float32
    assert np.array_equal(tensors.permute(0, 2, 3, 1).numpy(), floats)
    pil = draw(classes=[3]).images
    assert isinstance(pil[0], Image.Image) and np.array_equal(np.asarray(pil[0]), integers[0])
    latent = draw(classes=[3], output_type="latent")
    assert latent.images is latent.tokens
    with pytest.raises(ValueError, match="unknown output_type 'nq'; did you mean 'np'"):
        draw(classes=[3], output_type="nq")


def test_names_of_diffusers(pipe, draw):
    """Guidance of 1 is off in every family, as in diffusers: VAR's own ``cfg`` is one less."""
    off = 0.0 if pipe.family == "var" else 1.0
    ours = draw(classes=[3, 4], cfg=off + 1, output_type="latent").tokens
    theirs = draw(class_labels=[3, 4], guidance_scale=2.0, output_type="latent").tokens
    assert torch.equal(ours, theirs)
    for scale in (1.0, 0.5, 0):
        other = draw(class_labels=[3, 4], guidance_scale=scale, output_type="latent")
        assert not torch.equal(ours, other.tokens), "a scale that is not used would go unnoticed"
        assert torch.equal(draw(classes=[3, 4], cfg=off, output_type="latent").tokens, other.tokens)
        assert f"cfg {off:g}" in str(other.certificate)
    with pytest.raises(ValueError, match="give classes or class_labels, which mean the same"):
        draw(classes=[3], class_labels=[3])
    with pytest.raises(ValueError, match="give cfg or guidance_scale"):
        draw(classes=[3], cfg=2.0, guidance_scale=2.0)


def test_one_picture_for_one_seed(pipe, draw):
    given = dict(output_type="latent", generator=None, seed=None)
    listed = draw(classes=[3, 4], **given | dict(seed=[5, 9])).tokens
    for way in (
        dict(seed=9),
        dict(seed=[9]),
        dict(generator=seeded(9)),
        dict(generator=[seeded(9)]),
    ):
        alone = draw(classes=[4], **given | way).tokens[0]
        assert torch.allclose(alone, listed[1], rtol=0, atol=1e-5)
    assert torch.equal(draw(classes=[3, 4], **given | dict(seed=8)).tokens[1:], listed[1:])
    with pytest.raises(ValueError, match="give seed or generator, not both"):
        draw(classes=[3], seed=1)


def test_arguments_of_other_pipelines(pipe, draw):
    """What has a meaning is taken; what has none is one sentence."""
    picture = draw(classes=[3], height=pipe.side, width=pipe.side, negative_prompt=None).images[0]
    assert picture.size == (pipe.side, pipe.side)
    if pipe.family == "mar":
        steps = draw(classes=[3], num_iter=None, num_inference_steps=3)
        assert "num_iter 3" in str(steps.certificate)
    else:
        with pytest.raises(
            ValueError, match=r"num_inference_steps must be None for .* a step a tok"
        ):
            draw(classes=[3], num_inference_steps=20)
    for name, value in dict(height=333, width=20, negative_prompt="blur", latents=1).items():
        with pytest.raises(ValueError, match=rf"{name} must be (None|{pipe.side}) for ") as told:
            draw(classes=[3], **{name: value})
        assert "\n" not in str(told.value)
    with pytest.raises(
        TypeError, match="unknown argument 'temprature'; did you mean 'temperature'"
    ):
        draw(classes=[3], temprature=1.0)


@pytest.mark.parametrize(
    "classes",
    [torch.tensor([3, 4]), np.array([3, 4]), (3, 4), [np.int64(3), torch.tensor(4)], ["3", 4]],
    ids=lambda c: type(c).__name__,
)
def test_classes_of_any_kind(draw, classes: Classes):
    wanted = draw(classes=[3, 4], output_type="latent").tokens
    assert torch.equal(draw(classes=classes, output_type="latent").tokens, wanted)


def test_one_class_of_any_kind():
    for one in (3, "3", torch.tensor(3), np.int64(3), np.array(3)):
        assert [int(found) for found in listed(one)] == [3]


def test_a_tuple_instead_of_an_output(draw):
    output = draw(classes=[3], output_type="latent")
    images, tokens, stats, certificate, method, compiled, records = draw(
        classes=[3], output_type="latent", return_dict=False
    )
    assert torch.equal(images, output.tokens) and torch.equal(tokens, output.tokens)
    assert (certificate, method) == (output.certificate, output.method)
    assert compiled == output.compiled == [False]
    assert stats.tokens == output.stats.tokens and records == output.records


def test_one_generator_a_picture(draw):
    seeds = [seeded(1), seeded(2), seeded(3), seeded(4)]
    many = draw(classes=[3, 4], num_images_per_prompt=2, generator=seeds, output_type="latent")
    alone = draw(classes=[4], generator=[seeded(3)], output_type="latent")
    # one of 2,000 of VAR's tokens falls otherwise, and changes what follows: the beginning tells
    first = many.tokens[:, :14] - alone.tokens[:, :14]
    own, other = (first[i].abs().max() for i in (2, 3))
    assert own < other / 20, "up to the rounding of another batch it is the picture of its seed"


class Counting(PipelineCallback):
    """A callback of diffusers' own kind."""

    tensor_inputs = ("tokens",)

    def __init__(self):
        super().__init__(cutoff_step_ratio=None, cutoff_step_index=1)
        self.seen = []

    def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
        self.seen.append((pipeline, step_index, sorted(callback_kwargs)))
        return callback_kwargs


def test_callbacks(pipe, draw):
    counting = Counting()
    draw(classes=[3], callback_on_step_end=counting, output_type="latent")
    assert [step for _, step, _ in counting.seen] == list(range(len(counting.seen)))
    assert len(counting.seen) > 1 and counting.seen[0] == (pipe, 0, ["tokens"])
    nothing = []

    def note(*given):
        nothing.append(given[-1])
        return {}

    given = dict(classes=[3], output_type="latent", callback_on_step_end=note)
    draw(**given, callback_on_step_end_tensor_inputs=[])
    assert nothing and not any(nothing)
    with pytest.raises(ValueError, match="unknown callback_on_step_end_tensor_inputs 'latents'"):
        draw(**given, callback_on_step_end_tensor_inputs=["latents"])


METHODS = {
    "tiny": ("ar", "speculative", "eagle", "lantern++", "sjd", "gsd"),
    "pocket/var": ("ar", "code", methods.CoDe(2)),
    "pocket/mar": ("ar", "cspd", methods.CSpD("release")),
}


@pytest.mark.parametrize("count", [1, 4])
def test_callbacks_see_the_pictures_so_far(pipe, draw, count):
    """Whatever is drafted or stale behind their ends; what they write changes nothing."""
    several = {"num_iter": 6} if pipe.name == "pocket/mar" else {}  # windows of drafts
    for method in METHODS.get(pipe.name, METHODS["tiny"]):
        given = dict(classes=list(range(count)), method=method) | several
        wanted = draw(**given)
        whole = wanted.tokens
        shares = []

        def look(pipe, step, fewest, state, whole=whole, shares=shares):
            tokens = state["tokens"]
            assert tokens.shape == whole.shape
            drawn = tokens.any(-1) if tokens.ndim == 3 else tokens >= 0
            assert torch.equal(tokens[drawn], whole[drawn])
            shares.append(float(drawn.float().mean()))
            picture = pipe.decode_tokens(tokens)
            assert picture.shape == (len(whole), pipe.side, pipe.side, 3)
            tokens.zero_()  # the live buffer would be another picture
            return state

        found = draw(**given, callback_on_step_end=look)
        assert torch.equal(found.tokens, whole), method
        assert shares == sorted(shares) and shares[0] < 1 == shares[-1], (method, shares)
        assert [p.tobytes() for p in found.images] == [p.tobytes() for p in wanted.images]
        assert str(found.certificate) == str(wanted.certificate)


def test_an_interrupted_call_ends_after_its_round(pipe, draw):
    """As in diffusers, with what is drawn; the next call draws whole pictures."""
    for method in METHODS.get(pipe.name, METHODS["tiny"]):
        given = dict(classes=[0, 1, 2], method=method, batch_size=2)
        whole = draw(**given).tokens
        seen = []

        def stop(pipe, step, fewest, state, seen=seen):
            seen.append(fewest)
            pipe._interrupt = step == 0
            return state

        cut = draw(**given, callback_on_step_end=stop)
        assert len(seen) == 1 and len(cut.images) == len(cut.tokens) == 2, method
        drawn = cut.tokens.any(-1) if cut.tokens.ndim == 3 else cut.tokens >= 0
        assert torch.equal(cut.tokens[drawn], whole[:2][drawn]) and 0 < drawn.float().mean() < 1
        assert all(record["interrupted"] for record in cut.records)
        assert torch.equal(draw(**given).tokens, whole)


WRONG = [
    (dict(generator=3), "generator must be a torch.Generator or a list of them.*got 3"),
    (dict(generator=[3]), "generator must be a torch.Generator or a list of them.*got 3"),
    (dict(classes=None), "give .*classes|at least one class, got none"),
    (dict(classes=[]), "give .*classes|at least one class, got none"),
    (dict(classes=1.5), "classes must be names or ids of classes, got 1.5"),
    (dict(classes=torch.rand(2)), "classes must be names or ids of classes, got 0"),
    (dict(classes=object()), "classes must be names or ids of classes, got an object"),
    (dict(classes=[-1]), "class id must be at least 0, got -1"),
    (dict(method=object()), "method must be a name, such as ar, or a method.*got an object"),
    (dict(method=3), "method must be a name, such as ar, or a method.*got 3"),
    (dict(method=methods.AR), "method must be a name.*got <class 'specmm.methods.base.AR'>"),
    (dict(cfg="3"), "cfg must be a number, got '3'"),
    (dict(temperature="hot"), "temperature must be a number, got 'hot'"),
    (dict(batch_size="2"), "batch_size must be a whole number, got '2'"),
    (dict(num_images_per_prompt=1.5), "num_images_per_prompt must be a whole number, got 1.5"),
    (dict(output_type=3), "unknown output_type 3; choose from"),
    (dict(callback_on_step_end=3), "callback_on_step_end must be a function of the pipeline"),
    (dict(callback_on_step_end_tensor_inputs=torch.tensor(1)), "must be a text or a list of texts"),
    (dict(return_dict=torch.ones(2)), "return_dict must be True or False, got a Tensor"),
    (dict(compiled=torch.ones(2)), "compiled must be True, False or .auto., got a Tensor"),
    (dict(output_type=torch.ones(2)), "unknown output_type"),
    (dict(height=torch.ones(2)), "height must be .*, got a Tensor"),
    (dict(temperature=10**30), "temperature must be .*finite"),
    (dict(cfg=10**30), "cfg must be finite"),
    (dict(generator=None, seed=b"x"), "seed must be a whole number or a list of them, got a bytes"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_kinds_are_one_line(draw, wrong, said):
    with pytest.raises(ValueError, match=said) as told:
        draw(**{"classes": [3], **wrong})
    assert "\n" not in str(told.value)


def test_flags_and_trees_of_odd_kinds_are_one_line(tiny):
    """What only some families take."""
    tokens, scales = map(specmm.ImagePipeline.from_pretrained, (tiny, "pocket/var"))
    with pytest.raises(ValueError, match="more_smooth must be True or False, got a Tensor"):
        scales(classes=[1], more_smooth=torch.ones(2))
    for tree in (torch.ones(2), {"a": 1}, {1}, 3):
        with pytest.raises(ValueError, match="tree must be a name or numbers such as"):
            tokens(classes=[1], method="speculative", tree=tree)
    for prompt in (torch.ones(2), torch.tensor(1), np.array(1.0)):
        with pytest.raises(ValueError, match="prompt must be a text or a list of texts, got"):
            tokens(prompt=prompt)


def test_components(pipe):
    """All networks are registered, drafters and small models, too: they move together."""
    components = pipe.components
    own = "drafters" if "drafters" in components else "small"
    assert {"transformer", own} <= set(components)
    assert components[own] is not None and len(list(components[own].parameters())) > 0
    made = type(pipe)(**components)
    assert made.transformer is pipe.transformer and set(made.components) == set(components)


def test_networks_move_together(tiny, pipe):
    moving = specmm.ImagePipeline.from_pretrained(
        tiny if "tiny" in pipe.name else pipe.name, dtype="float32"
    )
    moving.to(torch.float64)
    parts = [m for m in moving.components.values() if isinstance(m, torch.nn.Module)]
    dtypes = {weight.dtype for part in parts for weight in part.parameters()}
    assert dtypes == {torch.float64} or moving.name == "pocket/var"  # whose codes stay in float32
    assert moving.dtype == torch.float64


def test_networks_rest_on_the_cpu(pipe, draw, monkeypatch):
    """And are moved for each call, also one that fails; the same tokens come."""
    wanted = draw(classes=[3], output_type="latent").tokens
    moves = []
    move = type(pipe).to
    monkeypatch.setattr(type(pipe), "to", lambda self, *a: moves.append(a) or move(self, *a))
    pipe.enable_model_cpu_offload(device="cpu")
    try:
        assert torch.equal(draw(classes=[3], output_type="latent").tokens, wanted)
        with pytest.raises(ValueError, match="classes must be"):
            draw(classes=1.5)
    finally:
        pipe.called_on = None
    assert [str(place) for (place,) in moves] == ["cpu"] * 5
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="enable_model_cpu_offload needs a GPU"):
            pipe.enable_model_cpu_offload()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_diffusers_finds_the_class(tiny, tmp_path, monkeypatch, dtype):
    """By the documented line; the same pictures come."""
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path))
    given = {} if dtype is None else {"dtype": dtype}
    here = dict(trust_remote_code=True, method="speculative", **given)
    pipe = DiffusionPipeline.from_pretrained(
        str(tiny), custom_pipeline=specmm.custom_pipeline, **here
    )
    ours = specmm.ImagePipeline.from_pretrained(tiny, "speculative", **given)
    assert type(pipe) is type(ours) and pipe.dtype == ours.dtype
    assert dtype is None or pipe.dtype == dtype
    ours.save_pretrained(tmp_path / "saved", safe_serialization=True, max_shard_size="5GB")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        DiffusionPipeline.from_pretrained(str(tmp_path / "saved"))
    saved = DiffusionPipeline.from_pretrained(str(tmp_path / "saved"), **here)
    out = [each(classes=[3], output_type="latent", seed=0) for each in (pipe, ours, saved)]
    assert torch.equal(out[0].tokens, out[1].tokens) and torch.equal(out[0].tokens, out[2].tokens)
    assert {one.method for one in out} == {"speculative"}


def test_saving_takes_diffusers_words(pipe, tmp_path):
    for name, value in (("safe_serialization", False), ("variant", "fp16"), ("push_to_hub", True)):
        with pytest.raises(ValueError, match=f"{name} must be .* weights are written as"):
            pipe.save_pretrained(tmp_path / "never", **{name: value})
    with pytest.raises(TypeError, match="unknown argument 'dtpe'; did you mean 'dtype'"):
        pipe.save_pretrained(tmp_path / "never", dtpe=torch.float16)
    assert not (tmp_path / "never").exists()


def test_help_lists_what_a_call_takes(pipe):
    parameters = inspect.signature(pipe.__call__).parameters.values()
    assert [p.name for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)] in (
        [],
        ["elsewhere"],  # arguments of other pipelines, each with its own sentence
    )
    assert {"class_labels", "guidance_scale", "return_dict"} <= {p.name for p in parameters}


def test_the_package_shows_what_is_public():
    assert dir(specmm) == sorted(specmm.__all__) and all(hasattr(specmm, n) for n in dir(specmm))
