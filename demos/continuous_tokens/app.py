"""Continuous tokens in a browser, plain and accelerated on one clock."""

from specmm.app.models import AppModels
from specmm.app.page import build, serve

INTRO = """
# Continuous tokens, their diffusion steps verified

MAR draws each token by a diffusion head of a hundred steps. `cspd` drafts a window of steps,
scores it in one call of the head and keeps what a maximal coupling allows: the same
distribution, about an eighth of the calls that a token waits for. Green is the share of steps
that did not wait.
"""

app = build(AppModels(only=("pocket/mar",)), INTRO)

if __name__ == "__main__":
    serve(app)
