"""Image tokens in a browser, plain and accelerated on one clock."""

from specmm.app.models import AppModels
from specmm.app.page import build, serve

INTRO = """
# Image tokens, drafted and verified

A block drafter guesses the next six tokens of a picture; LlamaGen reads all of them in one
forward and keeps those that the rule allows. `speculative` keeps LlamaGen's distribution
exactly, `lantern++` lets a token pass for its nearest codes and measures by how much. Read "One
round" after a race.
"""

app = build(AppModels(only=("pocket/llamagen",)), INTRO)

if __name__ == "__main__":
    serve(app)
