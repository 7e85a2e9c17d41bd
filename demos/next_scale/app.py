"""Next-scale models in a browser, plain and accelerated on one clock."""

from specmm.app.models import AppModels
from specmm.app.page import build, serve

INTRO = """
# Next-scale models, two in turns

VAR draws a picture scale by scale, the coarse ones first. `code` lets the large model draw the
coarse scales and a small one the fine ones, which hold most tokens; nothing is verified, and
the certificate says so.
"""

app = build(AppModels(only=("pocket/var",)), INTRO)

if __name__ == "__main__":
    serve(app)
