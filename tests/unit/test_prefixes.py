"""Pages of texts' beginnings: what is found, what goes first, pictures that tell texts apart."""

import random

import pytest
import torch

from specmm.serving.prefixes import PAGE, Page, Prefixes, digest_of


def page(first):
    return Page([torch.full((2, PAGE, 1, 1), float(first))])


SIZE = page(0).bytes


@pytest.mark.parametrize("seed", range(10))
def test_the_longest_beginning_in_pages_is_found(seed):
    random.seed(seed)
    prefixes, texts = Prefixes(10**9), []
    for _ in range(12):
        known = random.choice(texts) if texts else []
        texts.append(
            [
                *known[: random.randrange(60)],
                *(random.randrange(3) for _ in range(random.randrange(70))),
            ]
        )
        prefixes.keep("", texts[-1], page)
    for text in texts:
        asked = [*text[: random.randrange(len(text) + 1)], 5]

        def alike(other, n, asked=asked):
            return n <= len(other) // PAGE and other[: n * PAGE] == asked[: n * PAGE]

        most = max(n for n in range(len(asked) // PAGE + 1) if any(alike(t, n) for t in texts))
        found = prefixes.find("", asked)
        assert [float(one.arrays[0][0, 0]) for one in found] == [PAGE * n for n in range(most)]
        assert prefixes.find("a picture", asked) == []


def test_what_was_not_used_for_longest_goes_and_never_before_what_follows_it():
    prefixes = Prefixes(4 * SIZE)
    first, second, third = ([i] * 2 * PAGE for i in range(3))
    prefixes.keep("", first, page)
    prefixes.keep("", second, page)
    prefixes.find("", first)
    prefixes.keep("", third, page)
    assert [len(prefixes.find("", text)) for text in (first, second, third)] == [2, 0, 2]
    prefixes.keep("", [9] * PAGE, page)
    assert len(prefixes.find("", first)) == 1  # its end went
    assert prefixes.bytes == sum(one.bytes for one in prefixes.pages.values()) <= 4 * SIZE


def test_nothing_is_kept_where_there_is_no_room_and_what_cannot_be_made():
    none = Prefixes(0)
    none.keep("", [1] * 40, page)
    assert not none.pages
    some = Prefixes(10**9)
    some.keep("", [1] * 3 * PAGE, lambda first: None if first == PAGE else page(first))
    assert len(some.find("", [1] * 90)) == 1


def test_pictures_have_names_of_their_own():
    x = torch.arange(6.0)
    names = [
        digest_of({"pixels": x}),
        digest_of({"pixels": x.view(2, 3)}),
        digest_of({"pixels": x + 1}),
        digest_of({"other": x}),
        digest_of({"pixels": x, "sizes": [(3, 4)]}),
        digest_of({}),
    ]
    assert len(set(names)) == 6 and names[5] == ""
    assert digest_of({"pixels": x.bfloat16()}) != digest_of({"pixels": x.half()})
