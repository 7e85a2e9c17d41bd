"""Processes of their own that need not import everything: forks of one that has done nothing else.

To import PyTorch and Transformers takes a process longer than most of what tests have it do. A fork
of pytest's own process would have what other tests left, and autograd's threads would keep it from
training.
"""

import multiprocessing
from multiprocessing.context import ForkServerProcess

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["specmm.recipes.features", "transformers.models.qwen2.modeling_qwen2", "specmm.cli.all"]
)
COMMAND = """
import sys
import torch
from specmm.cli import main
torch.set_num_threads(1)
sys.stdout = sys.stderr = open(said, "w")
sys.argv = ["specmm", *words]
main()
"""


def forked(code: str, **given: object) -> ForkServerProcess:
    """A process that runs ``code``, with the names ``given``."""
    process = FORKS.Process(target=exec, args=(code, given))
    process.start()
    return process


def command(*words: object, said: object = "/dev/null") -> ForkServerProcess:
    """``specmm`` with ``words``; what it says goes into the file ``said``."""
    return forked(COMMAND, words=[str(word) for word in words], said=str(said))


def ended(process: ForkServerProcess) -> int | None:
    """The exit status, waited for."""
    process.join()
    return process.exitcode
