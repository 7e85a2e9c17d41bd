"""LANTERN's released code beside ours: its target, its EAGLE drafter and its decoding loop.

Their loop is for captions and one picture at a time, reads its parts from files and always computes
both branches of guidance. Set aside at run time, in modules that nobody else has:

- the package's ``__init__``, which imports another model, and the text encoder are left out;
- rows of our class table stand where captions do (:class:`ClassRows`), and the prefix of 120
  positions is one;
- target and drafter are made by their own ``__init__``, without that of transformers, whose
  configuration has other names by now; the loop without its own, which reads files;
- the table of neighbours holds int64: torch has no indices of 16 bits on a CPU;
- rotary factors of the drafter, whose sizes stand in its class, are set in by their own function.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Row
from benchmarks.official import duel, tokens
from benchmarks.official.duel import Draw, Made, Program
from benchmarks.official.releases import Modules, Source, running, with_constant, with_weights
from specmm import methods
from specmm.core.tree import TreeShape
from specmm.image_ar.tokens.drafters.eagle import EagleHead
from specmm.image_ar.tokens.gpt import GPTConfig
from specmm.image_ar.tokens.loading import to_lantern
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import static_tree
from specmm.verify.lantern import neighbour_table

TARGET = "models.kv_variants.modeling_llamagen_kv"
DRAFTER = "models.drafters.cnets_llamagen"
LOOP = "models.ea_model_llamagen"
CHOICES = "models.drafters.choices"
VQ = "models.base_models.llamagen.vq_model"
MODULES = (TARGET, DRAFTER, LOOP, CHOICES, VQ)
SOURCE = Source(
    "lantern",
    "https://github.com/jadohu/LANTERN",
    tuple(f"{name.replace('.', '/')}.py" for name in MODULES),
    MODULES,
    ("models", "models.base_models.llamagen.t5"),
)
PREFIX = 120  # positions, in their functions
SPARE = 128  # slots of their cache for a tree and for what they draw past the end
GUIDED = {"cfg": 1.5, "temperature": 0.8}  # the best FID of the settings tried with two branches
GREEDY = {"temperature": 0.0}
TREE = Dynamic()  # EAGLE-2's as theirs is by default
BOTH = dict(drafter="eagle", residual="release")
SAME: Mapping[str, methods.Method] = {
    "ar": methods.AR(),
    "lantern": methods.Lantern(**BOTH, **vars(TREE)),
    "lantern++, tree": methods.LanternPP(**BOTH, tree="naive_extend_57"),
    "lantern++, chain": methods.LanternPP(**BOTH, tree="chain(5)"),
}


class ClassRows(nn.Module):
    """Rows of a class ``table`` [classes + 1, C] where their loop has captions: as the encoder that
    gives them and as the projection, which leaves them as they are.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table
        self.uncond_embedding = table[-1:]

    def get_text_embeddings(self, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rows [B, 1, C] of ``classes``, and a mask of ones [B, 1]."""
        rows = self.table[torch.tensor(classes)][:, None]
        return rows, torch.ones(rows.shape[:2], dtype=torch.long)

    def forward(self, rows: Tensor, train: bool) -> Tensor:
        """``rows``."""
        return rows


def settings(config: GPTConfig, **other: Any) -> SimpleNamespace:
    """What their target and drafter read of a configuration."""
    positions = config.cls_token_num + config.block_size + SPARE
    given = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_head,
        max_position_embeddings=positions,
        rms_norm_eps=config.norm_eps,
        hidden_act="silu",
        pretraining_tp=1,
        pad_token_id=None,
    )
    return SimpleNamespace(**given | other)


def their_target(release: Modules, pipe: LlamaGenPipeline) -> Any:
    """Their transformer with our weights."""
    config, code = pipe.transformer.config, release[TARGET]
    state = dict(pipe.transformer.state_dict())
    rows = ClassRows(state.pop("cls_embedding.embedding_table.weight"))
    read = dict(rope_theta=config.rope_base, rope_base=config.rope_base, attention_bias=False)
    kinds = ("resid", "token", "class", "ffn")
    read |= {f"{kind}_dropout_p": 0.0 for kind in kinds}
    read |= dict(block_size=config.block_size, cls_token_num=config.cls_token_num)
    read |= dict(num_classes=config.num_classes, caption_dim=config.dim, input_type="t2i")
    read |= dict(output_attentions=False, output_hidden_states=False)
    read |= dict(use_cache=True, use_return_dict=True)

    def begin(self: Any, given: SimpleNamespace) -> None:
        nn.Module.__init__(self)
        self.config = given

    base: Any = code.LlamaPreTrainedModel
    base.__init__, base.post_init = begin, lambda self: None
    vars(code)["T5Embedder"] = lambda **_: rows
    with running():
        made = code.LlamaForCausalLM(settings(config, **read))
    made.model.cls_embedding = rows
    return with_weights(made, to_lantern(state))


def their_drafter(release: Modules, pipe: LlamaGenPipeline) -> Any:
    """Their drafter with the weights of our EAGLE head, and with their tree as they have it."""
    config, head = pipe.transformer.config, pipe.parts.drafters["eagle"]
    assert isinstance(head, EagleHead)
    code = release[DRAFTER]
    inner = head.config.ffn_dim or config.ffn_dim
    read = dict(num_hidden_layers=1, intermediate_size=inner, rope_scaling=None, input_type="c2i")
    tree = dict(total_tokens=TREE.total, depth=TREE.depth, top_k=TREE.top_k)
    with running():
        made = code.Model(settings(config, **read), **tree)
    table = code.precompute_freqs_cis_2d(config.grid, config.head_dim, config.rope_base, 0)
    made.freqs_cis = torch.cat([table, torch.zeros_like(table[:SPARE])])
    made.diff_device = False
    made.init_tree()
    return with_weights(made, head.state_dict())


def their_loop(release: Modules, pipe: LlamaGenPipeline) -> Any:
    """Their loop over their target and drafter, with our weights.

    Raises ``ValueError`` for a model without classes or without an EAGLE head.
    """
    config = pipe.transformer.config
    if config.model_type != "c2i" or "eagle" not in pipe.parts.drafters:
        raise ValueError(
            f"LANTERN's release needs a model of classes with an EAGLE head, got {pipe.name}, "
            f"{config.model_type} with {', '.join(pipe.parts.drafters) or 'no'} drafters"
        )
    loop: Any = release[LOOP].EaModel
    for name in ("generate", "initialize_tree", "initialize_tree_v1"):
        setattr(loop, name, with_constant(getattr(loop, name), PREFIX, config.cls_token_num))
    made = loop.__new__(loop)
    nn.Module.__init__(made)
    made.base_model = their_target(release, pipe)
    made.ea_layer = their_drafter(release, pipe)
    codes = pipe.parts.codebook
    made.nearest_latents = neighbour_table(codes, len(codes) - 1).numpy()
    return made


def asked(release: Modules, method: methods.Method) -> Row:
    """How their ``generate`` is asked for ``method``, one of ``SAME`` that draft.

    Raises ``ValueError`` where their tree of that name is another one.
    """
    if isinstance(method, methods.Lantern):
        return dict(lantern=True, lantern_k=method.k, lantern_delta=method.delta)
    assert isinstance(method, methods.LanternPP) and isinstance(method.tree, str)
    name = method.tree.partition("(")[0]
    choices = getattr(release[CHOICES], name)
    own, theirs = static_tree(method.tree), TreeShape.from_choices(choices)
    if not own.parents.equal(theirs.parents):
        raise ValueError(
            f"the release's tree {name} must be ours of {own.parents.shape[1]} nodes, got another "
            f"of {theirs.parents.shape[1]}: the release is another one than this was made for"
        )
    bound = dict(lantern=True, lantern_k=method.k, lantern_delta=method.lambda_)
    return bound | dict(static_tree=True, tree_choices=choices)


def official(release: Modules, pipe: LlamaGenPipeline) -> dict[str, Program]:
    """Their programs by the names of ``SAME``; their cache is made once and kept."""
    loop = their_loop(release, pipe)
    vq = tokens.their_vq(release[VQ], pipe.vq)
    length = pipe.transformer.config.block_size

    def drawing(generate: Callable[..., Any], options: Row) -> Draw:
        def draw(classes: Sequence[int], seed: int) -> Made:
            random.seed(seed)
            torch.manual_seed(seed)
            loop.reset_tree_mode()  # their plain decoding does not
            found, tau, _ = generate(list(classes), length, top_k=0, top_p=1.0, **options)
            return Made(tokens.their_pictures(vq, found), found, tau)

        return draw

    def kept() -> int:
        return sum(x.nbytes for x in vars(loop.base_model).get("past_key_values_data", ()))

    made = {}
    for name, method in SAME.items():
        generate = loop.base_model.generate if method.name == "ar" else loop.generate
        options = GUIDED | ({} if method.name == "ar" else asked(release, method))
        draws = (drawing(generate, options | given) for given in ({}, GREEDY))
        made[name] = Program(*draws, kept=kept)
    return made


def ours(pipe: LlamaGenPipeline, method: methods.Method) -> Program:
    """Our pipeline's call, guided as theirs is."""
    return duel.ours(pipe, GREEDY, method=method, **GUIDED)
