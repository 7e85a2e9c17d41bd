"""The recorded numbers of VAR's and CoDe's releases.

The ``.json`` beside each file in tests/parity/var says which call made which tensor.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

PARITY = Path(__file__).parents[1] / "parity" / "var"
VARIANTS = ("noshared", "shared", "nol2")


class Case:
    """One parity file: ``t["x"]`` its tensors, ``state(prefix)`` its weights in float32, ``facts``
    its json.
    """

    def __init__(self, name):
        self.t = load_file(PARITY / f"{name}.safetensors")
        self.facts = json.loads((PARITY / f"{name}.json").read_text())

    def state(self, prefix="weights."):
        found = {k.removeprefix(prefix): v for k, v in self.t.items() if k.startswith(prefix)}
        return {k: v.float() if v.is_floating_point() else v for k, v in found.items()}

    def scales(self, prefix):
        return [self.t[f"{prefix}.{k}"] for k in range(4)]


def close(got, wanted, atol=5e-4):
    torch.testing.assert_close(got, wanted, atol=atol, rtol=0)
