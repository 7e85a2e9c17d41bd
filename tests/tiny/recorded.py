"""What releases produced, in tests/parity: the ``.json`` beside each file says by which call."""

import json
from functools import cache
from pathlib import Path

from safetensors.torch import load_file

from specmm.image_ar.continuous.mar import MAR, MARConfig

PARITY = Path(__file__).parents[1] / "parity"


def facts(name):
    return json.loads((PARITY / f"{name}.json").read_text())


def tensors(name):
    return load_file(PARITY / f"{name}.safetensors")


def under(group, prefix):
    return {k.removeprefix(prefix): v for k, v in group.items() if k.startswith(prefix)}


def floats(group):
    return {k: v.float() if v.is_floating_point() else v for k, v in group.items()}


class Case:
    """One file: ``t["x"]`` its tensors, ``state(prefix)`` its weights in float32, ``facts`` its
    json.
    """

    def __init__(self, name):
        self.t, self.facts = tensors(name), facts(name)

    def state(self, prefix="weights."):
        return floats(under(self.t, prefix))

    def scales(self, prefix):
        """Of VAR: something of each of the four scales."""
        return [self.t[f"{prefix}.{k}"] for k in range(4)]


def mar_of(sizes, name):
    """A MAR of those of ``sizes`` that it has, and the weights of a file."""
    known = {k: v for k, v in sizes.items() if k in MARConfig.__dataclass_fields__}
    made = MAR(MARConfig(**known))
    made.load_state_dict(floats(tensors(f"cspd/{name}_state_fp16")))
    return made.eval().requires_grad_(False)


@cache
def tiny_mar():
    return mar_of(facts("cspd/mar_tiny")["config"], "mar_tiny")
