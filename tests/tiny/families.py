"""Tiny random models of every class, and ragged batches for them: two pictures, none, one."""

import torch
import transformers as tf

from tests.tiny import parts
from tests.tiny.parts import CLIP, DEEPSTACK, MROPE, PIXELS, QWEN_SIZES, QWEN_TOWER, TOWER, WINDOWED

VOCABULARY, IMAGE, VIDEO, START = 40, 36, 37, 38
TEXT = parts.TEXT | dict(vocab_size=VOCABULARY)
SLIDING = dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)


def llava(text="llama", image=IMAGE, **extra):
    config = tf.LlavaConfig(
        vision_config=CLIP,
        text_config=dict(model_type=text, **(TEXT | extra)),
        image_token_index=image,
        image_seq_length=4,
    )
    return tf.LlavaForConditionalGeneration(config)


def llava_next():
    config = tf.LlavaNextConfig(
        vision_config=CLIP,
        text_config=dict(model_type="llama", **TEXT),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]],
    )
    return tf.LlavaNextForConditionalGeneration(config)


def qwen(name, vision, text=None):
    config = getattr(tf, name + "Config")(
        vision_config=vision,
        text_config=TEXT | dict(rope_scaling=MROPE, rope_parameters=MROPE) | (text or {}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=39,
    )
    return getattr(tf, name + "ForConditionalGeneration")(config)


def idefics(name):
    config = getattr(tf, name + "Config")(
        vision_config=PIXELS,
        text_config=dict(model_type="llama", **TEXT),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    return getattr(tf, name + "ForConditionalGeneration")(config)


QWEN_VISION = QWEN_SIZES | dict(embed_dim=16, hidden_size=32, mlp_ratio=2)
MODELS = {
    "llava": llava,
    "llava on mistral": lambda: llava("mistral", sliding_window=5),
    "llava on qwen2": lambda: llava("qwen2", **SLIDING),
    "llava-next": llava_next,
    "qwen2-vl": lambda: qwen("Qwen2VL", QWEN_VISION),
    "qwen2-vl sliding": lambda: qwen("Qwen2VL", QWEN_VISION, SLIDING),
    "qwen2.5-vl": lambda: qwen("Qwen2_5_VL", WINDOWED),
    "qwen3-vl": lambda: qwen("Qwen3VL", DEEPSTACK, dict(head_dim=8)),
    "idefics3": lambda: idefics("Idefics3"),
    "smolvlm": lambda: idefics("SmolVLM"),
}

DELTA = parts.LINEAR | dict(
    head_dim=8,
    num_hidden_layers=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)


def lfm2():
    text = TEXT | dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2)
    config = tf.Lfm2VlConfig(
        vision_config=TOWER | dict(patch_size=4, num_patches=16),
        text_config=text | dict(model_type="lfm2", block_auto_adjust_ff_dim=False),
        image_token_id=IMAGE,
        downsample_factor=2,
        projector_hidden_size=32,
    )
    return tf.Lfm2VlForConditionalGeneration(config)


WITH_STATES = {  # whose drafts are chains
    "qwen3.5": lambda: qwen(
        "Qwen3_5",
        QWEN_TOWER | dict(num_position_embeddings=64),
        DELTA | dict(rope_parameters=MROPE | dict(partial_rotary_factor=1.0)),
    ),
    "lfm2": lfm2,
}


def random_model(name, seed=0, std=0.25, make=None):
    torch.manual_seed(seed)
    model = (make or (MODELS | WITH_STATES)[name])().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, std, generator=generator)
            elif "newline" in key:  # of LLaVA-NeXT, a vector
                parameter.normal_(0, 1, generator=generator)
    return parts.ending(model)


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(int(seed)))


def llava_pictures(rows):
    seeds = [s for row in rows for s in row]
    return {s: 4 for s in seeds}, {"pixel_values": [noise(s, 1, 3, 8, 8) for s in seeds]}


def next_pictures(rows):
    """An odd seed is a picture 8 high and 16 wide: the base tile and two more, a newline after each
    row.
    """
    seeds = [s for row in rows for s in row]
    sizes = [torch.tensor([[8, 16] if int(s) % 2 else [16, 8]]) for s in seeds]
    count = {s: 4 + 2 * (4 + 1) if int(s) % 2 else 4 + 4 * (2 + 1) for s in seeds}
    return count, {"pixel_values": [noise(s, 1, 3, 3, 8, 8) for s in seeds], "image_sizes": sizes}


def qwen_pictures(rows):
    seeds = [s for row in rows for s in row]
    grids = {s: torch.tensor([[1, 4, 2 + 2 * (int(s) % 3)]]) for s in seeds}
    pixels = [noise(s, int(grids[s].prod()), 3 * 2 * 16) for s in seeds]
    vision = {"pixel_values": pixels, "image_grid_thw": [grids[s] for s in seeds]}
    return {s: int(grids[s].prod()) // 4 for s in seeds}, vision


def idefics_pictures(rows):
    most = max(map(len, rows))
    tiles = [
        [noise(s, 3, 16, 16) for s in row] + [torch.zeros(3, 16, 16)] * (most - len(row))
        for row in rows
    ]
    stacked = [torch.stack(row)[None] for row in tiles] if most else []
    return {s: 4 for row in rows for s in row}, {"pixel_values": stacked}


def lfm2_pictures(rows):
    seeds = [s for row in rows for s in row]
    patches = torch.ones(1, 16, dtype=torch.int64)
    vision = {
        "pixel_values": [noise(s, 1, 16, 48) for s in seeds],
        "pixel_attention_mask": [patches] * len(seeds),
        "spatial_shapes": [torch.tensor([[4, 4]])] * len(seeds),
    }
    return dict.fromkeys(seeds, 4), vision


PICTURES = {
    "lfm2": lfm2_pictures,
    "qwen3.5": qwen_pictures,
    "llava": llava_pictures,
    "llava-next": next_pictures,
    "qwen2": qwen_pictures,
    "qwen2.5": qwen_pictures,
    "qwen3": qwen_pictures,
    "idefics3": idefics_pictures,
    "smolvlm": idefics_pictures,
}


def pictures(name, rows, image=IMAGE):
    """Token ids of each row and what goes with them; ``rows`` lists words (ids) and pictures
    (seeds, as text).
    """
    kind = max((k for k in PICTURES if name.startswith(k)), key=len)
    count, vision = PICTURES[kind]([[p for p in row if isinstance(p, str)] for row in rows])
    ids = [
        [t for p in row for t in ([image] * count[p] if isinstance(p, str) else [p])]
        for row in rows
    ]
    return ids, {k: torch.cat(v) for k, v in vision.items() if v}


def batch(name, rows, image=IMAGE):
    """What a processor would give, padded at the left as generate wants it."""
    ids, vision = pictures(name, rows, image)
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    inputs = {"input_ids": padded, "attention_mask": mask, **vision}
    if name.startswith("qwen"):
        inputs["mm_token_type_ids"] = (padded == IMAGE).int()
    return inputs


ROWS = [[1, 5, "1", 6, "2", 7, 8], [1, 9, 10, 11, 9, 10], ["3", 12, 13, 14]]


class Zoo:
    """Models by name and seed, made once, and batches for them; ``rows`` are the standard ones."""

    rows = ROWS

    def __init__(self, image=IMAGE, make=None):
        self.image, self.make, self.made = image, make, {}

    def model(self, name, seed=0, std=0.25):
        key = name, seed, std
        if key not in self.made:
            with torch.inference_mode(False):  # other tests train with it
                self.made[key] = random_model(*key, self.make)
        return self.made[key]

    def batch(self, name, rows):
        return batch(name, rows, self.image)

    def of_vocabulary(self, size):
        """LLaVAs of ``size`` tokens, the last of which stands for pictures."""
        return Zoo(size - 1, lambda: llava(image=size - 1, vocab_size=size))

    def of_depth(self, layers):
        """LLaVAs of so many layers."""
        return Zoo(self.image, lambda: llava(num_hidden_layers=layers))
