"""Uniform streams: reproducible, one a row, blind to the batch; categorical draws follow the
distribution.
"""

from __future__ import annotations

import pytest
import torch

from specmm.core.randomness import BLOCK, Uniforms, categorical, sample_generators

CPU = torch.device("cpu")


def test_a_row_sees_its_own_generator_only():
    together, alone = Uniforms.from_seeds([1, 2, 3]), Uniforms.from_seeds([2])
    for count in (5, 1, 17, BLOCK, 3, 2 * BLOCK + 1, 4):
        assert torch.equal(together.draw(count)[1], alone.draw(count)[0])


def test_numbers_do_not_depend_on_how_they_are_asked_for():
    asked = [1, 7, BLOCK - 3, 11, 100, 2 * BLOCK + 5, 3]
    stream = Uniforms.from_seeds([4])
    pieces = torch.cat([stream.draw(count) for count in asked], dim=1)
    generator = torch.Generator().manual_seed(4)
    blocks = torch.cat([torch.rand(BLOCK, generator=generator) for _ in range(4)])
    assert torch.equal(pieces[0], blocks[: sum(asked)])


def test_a_look_ahead_takes_nothing():
    looking, stream = Uniforms.from_seeds([4, 5]), Uniforms.from_seeds([4, 5])
    for count in (3, BLOCK - 5, 7, 2 * BLOCK):
        ahead = looking.ahead(count)
        assert torch.equal(ahead[:, : count - 2], looking.draw(count - 2))
        assert torch.equal(ahead[:, : count - 2], stream.draw(count - 2))
    assert torch.equal(looking.draw(9), stream.draw(9))


def test_the_global_state_is_left_alone():
    before = torch.random.get_rng_state()
    Uniforms.from_seeds([0]).draw(10)
    assert torch.equal(before, torch.random.get_rng_state())


def test_numbers_are_uniform():
    numbers = Uniforms([torch.Generator().manual_seed(0)], dtype=torch.float64).draw(100_000)
    assert numbers.dtype == torch.float64 and numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    # chi-square, 19 degrees of freedom, p = 0.001
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 43.8


@pytest.mark.parametrize("scale", [1.0, 1e-12, 37.0])
def test_categorical_follows_the_distribution_whatever_its_total(scale):
    probs = torch.tensor([0.0, 0.3, 0.0, 0.5, 0.2, 0.0], dtype=torch.float64)
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = categorical((probs * scale).expand(1000, -1), uniform)
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 300, 0, 500, 200, 0]


def test_an_impossible_index_is_never_drawn():
    probs = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]])
    assert categorical(probs, torch.tensor([0.0])).tolist() == [1]
    assert categorical(probs, torch.tensor([0.5])).tolist() == [3]
    assert categorical(probs, torch.tensor([1 - 2**-24])).tolist() == [3]


def test_the_largest_uniform_stays_inside_the_support():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(200, 1000, generator=generator)
    probs[:, 600:] = 0
    largest = torch.full((200,), 1 - 2**-24)
    assert (categorical(probs, largest) < 600).all()


def _seeds(count: int = 1, **given: object) -> list[int]:
    return [one.initial_seed() for one in sample_generators(count, CPU, **given)]


def _generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_one_sample_for_one_seed_whichever_way_it_is_given() -> None:
    ways = (
        dict(seed=3),
        dict(seed=[3]),
        dict(generator=_generator()),
        dict(generator=[_generator()]),
    )
    assert [_seeds(**way) for way in ways] == [[3]] * 4
    assert _seeds(3, seed=3) == _seeds(3, generator=_generator()) == [3, 4, 5]
    assert _seeds(2, seed=[5, 3]) == _seeds(2, generator=[_generator(5), _generator()]) == [5, 3]
    fresh = sample_generators(1, CPU, seed=3)[0]
    assert torch.equal(torch.rand(4, generator=fresh), torch.rand(4, generator=_generator()))


def test_a_generator_that_was_used_draws_others() -> None:
    ours, theirs = _generator(), _generator()
    first, second, third = (_seeds(2, generator=ours) for _ in range(3))
    assert first == [3, 4] and len({*first, *second, *third}) == 6
    torch.rand(7, generator=theirs)
    assert _seeds(generator=theirs) not in ([3], second[:1])


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(seed=[1, 2]), "seed must be one or one for each of the 3 samples, got 2"),
        (dict(generator=[_generator()]), "generator must be one or one for each .* got 1"),
        (dict(seed=1, generator=_generator()), "give seed or generator, not both"),
        (dict(seed=2**64), "seed must be from -2.63 to 2.64 - 1"),
        (dict(seed=True), "seed must be a whole number"),
        (dict(seed=[1, 2, "3"]), "seed must be a whole number or a list of them, got '3'"),
        (dict(generator=7), "generator must be a torch.Generator"),
    ],
)
def test_wrong_seeds_are_one_line(given, said) -> None:
    with pytest.raises(ValueError, match=said):
        sample_generators(3, CPU, **given)


def test_without_a_seed_runs_differ_and_seeds_can_be_typed() -> None:
    assert _seeds() != _seeds()
    assert 0 <= _seeds()[0] < 2**53
    assert _seeds(2, seed=2**64 - 1) == [2**64 - 1, 0]
