"""``python -m kakeya_zmq.model.folder_probe FOLDER``: what keeps a model from being loaded, a JSON object a line.

mlx-lm builds the model and holds its parameters against the names and shapes in the weight files, as a daemon has it do; but
nothing is evaluated, so that of the weights only the headers are read, however large they are. What is written is certain,
silence is not: weights may have the right shapes and the wrong numbers, and a kind whose conversion computes with the
weights is given up before it has taken much memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from typing import Final

from kakeya_zmq.model.blas import prepare_blas
from kakeya_zmq.model.loader import LOAD_FAILURES
from kakeya_zmq.text import TextCodec
from wire.errors import ModelError
from wire.limits import MIB

MEMORY_MAX_BYTES: Final = 256 * MIB
"""Of arrays. Parameters that nobody evaluates take none."""
LOOK_SECONDS: Final = 0.02
TEXT_PACKAGES: Final = ("tokenizers", "jinja2")
REASON_CHARACTERS_MAX: Final = 160
"""The number of parameters that do not fit, and the first of them."""


def weights_fault(folder: Path) -> ModelError | None:
    """Why mlx-lm would not load the model; None when nothing was found, or it cannot be told."""
    prepare_blas(1)
    from mlx_lm.utils import load_model

    done = threading.Event()
    threading.Thread(target=_give_up_on_memory, args=(done,), name="memory", daemon=True).start()
    try:
        load_model(folder, lazy=True)
    except MemoryError:  # this process's own, and no fault of the model
        return None
    except LOAD_FAILURES as error:
        reason = " ".join(str(error).replace(str(folder), folder.name).split()) or type(error).__name__
        shown = reason if len(reason) <= REASON_CHARACTERS_MAX else f"{reason[:REASON_CHARACTERS_MAX]}…"
        remedy = "download or convert the model again; else see whether this version of mlx-lm supports it"
        return ModelError(f"mlx-lm cannot load it: {shown}", remedy=remedy)
    finally:
        done.set()
    return None


def tokenizer_fault(folder: Path) -> ModelError | None:
    """Why texts could not be turned into tokens; None also where the packages for that are missing."""
    if any(importlib.util.find_spec(name) is None for name in TEXT_PACKAGES):
        return None
    try:
        TextCodec.load(folder)
    except ModelError as error:
        return error
    return None


def _give_up_on_memory(done: threading.Event) -> None:
    """End the process when arrays are computed after all."""
    import mlx.core as mx

    while not done.wait(LOOK_SECONDS):
        if mx.get_active_memory() > MEMORY_MAX_BYTES:
            os._exit(0)


def _tell(part: str, error: ModelError | None) -> None:
    if error is not None:
        print(json.dumps({"part": part, "error": error.message, "remedy": error.remedy}), flush=True)


if __name__ == "__main__":
    given = Path(sys.argv[1])
    _tell("tokenizer", tokenizer_fault(given))
    _tell("weights", weights_fault(given))
