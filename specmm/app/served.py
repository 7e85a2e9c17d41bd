"""The app as a client of a server of OpenAI's protocol: a chat with the models that run there."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gradio as gr
import httpx

from specmm.app.models import in_sentences
from specmm.app.page import KEEP, WAITING
from specmm.app.words import LARGEST
from specmm.loading.files import sentence_of
from specmm.loading.pictures import packed
from specmm.runs.load import (
    CHAT,
    COMPLETIONS,
    PATIENCE,
    UNLISTED,
    event_of,
    listed,
    protocol,
    said_in,
)
from specmm.vlm.pictures import open_image


class Served:
    """The models of the server at ``url``, with an API ``key`` if it needs one.

    Raises ``ValueError`` for a server that lists no models.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.base, headers = protocol(url, key)
        self.client = httpx.Client(headers=headers, timeout=PATIENCE)
        try:
            self.models = listed(self.client.get(f"{self.base}/models"))
        except UNLISTED as error:
            raise ValueError(
                f"{self.base}/models must list models, got: {sentence_of(error)}; start a server "
                "(specmm serve MODEL), or give its address and key"
            ) from error

    def answer(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yields the answer so far and, from a specmm server, a line about its method ("" until it
        is sent).

        Raises ``ValueError`` with the server's own sentence.
        """
        text, note = "", ""
        try:
            with self.client.stream("POST", self.base + path, json={**body, "stream": True}) as got:
                if got.status_code != 200:
                    got.read()
                    raise ValueError(_sentence(got))
                for line in got.iter_lines():
                    event = event_of(line)
                    text += "".join(map(said_in, event.get("choices") or ()))
                    if extension := event.get("specmm"):
                        rate = f"{extension['tau']:.2f} tokens a round"
                        note = f"{extension['method']}: {rate}, {extension['certificate']}"
                    yield text, note
        except httpx.HTTPError as error:
            raise ValueError(f"the server does not answer: {sentence_of(error)}") from error


def _sentence(answer: httpx.Response) -> str:
    """The server's error message for a refused request."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server says status {answer.status_code}"


def messages_of(history: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> list[Any]:
    """Gradio's ``history`` and the new question ``asked``, as OpenAI's messages."""
    turns = [(turn["role"], turn["content"]) for turn in history]
    files = [{"type": "file", "file": {"path": path}} for path in asked.get("files") or ()]
    turns.append(("user", [*files, {"type": "text", "text": asked.get("text") or ""}]))
    return [{"role": role, "content": _content(content)} for role, content in turns]


def _content(content: Any) -> Any:
    """A turn's content: its text, or a list of parts if it has others."""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    return parts[0]["text"] if [part["type"] for part in parts] == ["text"] else parts


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    data = base64.b64encode(packed(open_image(part["file"]["path"]))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def chat(served: Served) -> gr.Blocks:
    """The page; ``specmm.app.page.serve`` opens it."""

    def ask(
        asked: dict[str, Any],
        history: list[dict[str, Any]],
        model: str,
        length: float,
        temperature: float,
        seed: float,
        plain: bool,
    ) -> Iterator[tuple[str, str]]:
        body = {"model": model, "max_tokens": int(length), "temperature": temperature}
        body["seed"] = int(seed)
        if plain:
            yield from served.answer(COMPLETIONS, body | {"prompt": asked.get("text") or ""})
        else:
            yield from served.answer(CHAT, body | {"messages": messages_of(history, asked)})

    with gr.Blocks(title="specmm", analytics_enabled=False, delete_cache=KEEP) as app:
        gr.Markdown(f"# specmm\nA chat with the models at {served.base}.", elem_classes="intro")
        model = gr.Dropdown(served.models, value=served.models[0], label="Model")
        note = gr.Markdown("Each answer says here how it was made.", render=False)
        gr.ChatInterface(
            in_sentences(ask),
            multimodal=True,
            # without the button that uploads a chat to a hub
            chatbot=gr.Chatbot(label="Chat", buttons=["copy", "copy_all"], render=False),
            textbox=gr.MultimodalTextbox(
                placeholder=f"A question, with pictures of at most {LARGEST}",
                file_types=["image"],
                file_count="multiple",
                render=False,
            ),
            additional_inputs=[
                model,
                gr.Number(128, label="Most tokens", precision=0, minimum=1, render=False),
                gr.Slider(0, 2, 0, step=0.1, label="Temperature, 0 is greedy", render=False),
                gr.Number(0, label="seed", precision=0, minimum=0, maximum=2**31, render=False),
                gr.Checkbox(label="Continue my text, for models without chats", render=False),
            ],
            additional_inputs_accordion=gr.Accordion("Settings", open=False, render=False),
            additional_outputs=[note],
            flagging_mode="never",
            api_visibility="private",
        )
        note.render()
    app.queue(max_size=WAITING, api_open=False)
    return app
