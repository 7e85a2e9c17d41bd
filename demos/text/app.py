"""Text by diffusion drafters in a browser, plain and accelerated on one clock."""

from specmm.app.models import AppModels
from specmm.app.page import build, serve

INTRO = """
# Code continued, drafted by diffusion

A small diffusion model fills a block of tokens at once (`block`, `deer`, `diffuspec`,
`specdiff`); the language model checks the block in one forward. At temperature 0 the text is
that of plain decoding.
"""

app = build(AppModels(only=("pocket/coder",)), INTRO)

if __name__ == "__main__":
    serve(app)
