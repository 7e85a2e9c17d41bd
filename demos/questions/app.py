"""Questions about pictures in a browser, plain and accelerated on one clock."""

from specmm.app.models import AppModels
from specmm.app.page import build, serve

INTRO = """
# Questions about pictures, answered faster

A drafter that reads the target's hidden states (MSD) guesses several words of the answer; the
vision-language model checks them in one forward. The answer is the model's own, word for word.
"""

app = build(AppModels(only=("pocket/llava",)), INTRO)

if __name__ == "__main__":
    serve(app)
