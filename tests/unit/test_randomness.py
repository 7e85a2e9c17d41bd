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


def test_one_generator_a_picture() -> None:
    first, again = (sample_generators(torch.Generator().manual_seed(0), 3, CPU) for _ in range(2))
    draws = [torch.rand(4, generator=g) for g in first]
    assert all(
        torch.equal(d, torch.rand(4, generator=g)) for d, g in zip(draws, again, strict=True)
    )
    assert len({tuple(d.tolist()) for d in draws}) == 3
    longer = sample_generators(torch.Generator().manual_seed(0), 5, CPU)
    assert torch.equal(draws[2], torch.rand(4, generator=longer[2]))


def test_generators_given_are_those_used() -> None:
    given = [torch.Generator().manual_seed(i) for i in range(2)]
    assert sample_generators(given, 2, CPU) == given
    with pytest.raises(ValueError, match="each of the 3 samples, got 2"):
        sample_generators(given, 3, CPU)


def test_without_a_generator_runs_differ() -> None:
    one, two = (sample_generators(None, 1, CPU)[0].initial_seed() for _ in range(2))
    assert one != two
