"""Whether drafts change what a model's own generate answers."""

import torch

import specmm


def as_generate(model, inputs, length, *how, **more):
    """Whether greedy answers of ``length`` tokens to ``inputs`` (ids, or all that generate takes)
    are the model's own where ``custom_generate`` drafts, asked for ``how``; ``more`` are options of
    generate.
    """
    given = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else inputs
    given = dict(given, max_new_tokens=length, do_sample=False, **more)
    ours = model.generate(**given, custom_generate=specmm.custom_generate(*how))
    return torch.equal(ours, model.generate(**given))


def ragged_as_generate(model, prompts, length, *how):
    """Whether rows of unequal ``prompts``, answered together, are what generate answers to each."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    options = dict(max_new_tokens=length, do_sample=False)
    run = specmm.custom_generate(*how)
    found = model.generate(ids, attention_mask=mask, custom_generate=run, **options)[:, width:]
    each = [model.generate(torch.tensor([row]), **options)[0, len(row) :] for row in prompts]
    return all(map(torch.equal, found, each))
