"""Pictures by OpenAI's protocol: ``/v1/images/generations`` of every picture family."""

from __future__ import annotations

import base64
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from specmm import methods
from specmm.image_ar.records import picture_file
from specmm.methods.making import parse_method
from specmm.runs.run import Place, check_sampling, methods_of, open_model
from specmm.serving.fields import Fields, Refused

MOST = 16  # pictures of a request
TOGETHER = 8  # drawn at a time
SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
IGNORED = ("user",)


class Painter:
    """Draws pictures by the pipeline ``pipe`` of the model ``name``, by ``method`` unless a request
    names one; it refuses requests once it is ``stopped``.
    """

    def __init__(self, name: str, pipe: Any, method: Any) -> None:
        self.name = name
        self.pipe = pipe
        self.method = method
        self.stopped = False

    @classmethod
    def open(cls, model: str, place: Place, method: str, drafter: str | None) -> Painter:
        """The painter of a ``model``; ``auto`` is plain decoding where a family has no ``auto``.

        Raises ``ValueError`` for an unknown model or method.
        """
        registry = methods_of("images", model)
        known = method if method != methods.Auto.name or method in registry else methods.AR.name
        made = parse_method(registry, known)
        return cls(model, open_model("images", model, place, made, drafter), made)

    def wanted(self, fields: Fields, most: int) -> Callable[[Callable[[], bool]], dict[str, Any]]:
        """The function that draws the pictures of a request; its argument tells whether the client
        has left.

        Raises :class:`Refused` and ``ValueError`` for requests that cannot be drawn.
        """
        prompt = fields.any("prompt")
        if isinstance(prompt, bool) or not isinstance(prompt, str | int) or prompt == "":
            wanted = "a text" if self.pipe.takes == "prompt" else "the name or number of a class"
            raise fields.wrong("prompt", wanted, prompt)
        n = fields.whole("n", 1, min(MOST, most)) or 1
        seed = fields.whole("seed", 0, 2**63 - 1)
        name = fields.text("method")
        method = self.method if name is None else parse_method(self.pipe.registry, name)
        sampling = {
            "cfg": fields.number("cfg", 0, 1000),
            "temperature": fields.number("temperature", 0, 100),
            "top_k": fields.whole("top_k", 0, 2**31),
            "top_p": fields.number("top_p", 1e-6, 1),
        }
        options: dict[str, Any] = {k: v for k, v in sampling.items() if v is not None}
        options |= _size(fields)
        fields.only("pictures are in the answer", response_format="b64_json")
        fields.only("pictures are PNG files", output_format="png")
        fields.ignore(*IGNORED)
        fields.done()
        check_sampling(self.pipe, self.name, {k: v for k, v in options.items() if k in sampling})
        options[self.pipe.takes] = [prompt] * n
        first = secrets.randbelow(2**31) if seed is None else seed
        one = method.one_generator
        options |= {"seed": first if one else [(first + i) % 2**63 for i in range(n)]}
        options |= {"method": method, "batch_size": n if one else min(n, TOGETHER)}
        return lambda gone: self._draw(options, gone)

    def _draw(self, options: Mapping[str, Any], gone: Callable[[], bool]) -> dict[str, Any]:
        """The response with the pictures of a call."""

        def after_round(pipe: Any, *_: Any) -> dict[str, Any]:
            pipe._interrupt = self.stopped or gone()
            return {}

        out = self.pipe(**options, callback_on_step_end=after_round)
        if any(record.get("interrupted") for record in out.records):
            raise Refused("the server ended before the pictures were drawn", status=503)
        files = [
            picture_file(image, "png", record)
            for image, record in zip(out.images, out.records, strict=True)
        ]
        width, height = out.images[0].size
        return {
            "created": int(time.time()),
            "data": [{"b64_json": base64.b64encode(file).decode()} for file in files],
            "output_format": "png",
            "size": f"{width}x{height}",
            "specmm": {
                "method": out.method,
                "tau": out.stats.tau,
                "certificate": str(out.certificate),
                "seeds": [record["seed"] for record in out.records],
            },
        }


def _size(fields: Fields) -> dict[str, int]:
    """``size`` as a call's height and width; "auto" is the model's."""
    text = fields.text("size")
    if text in (None, "auto"):
        return {}
    found = SIZE.fullmatch(text or "")
    if found is None:
        raise fields.wrong("size", "WIDTHxHEIGHT in pixels, or auto", text)
    return {"width": int(found[1]), "height": int(found[2])}
